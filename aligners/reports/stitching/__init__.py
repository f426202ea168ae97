"""The report of stitching."""
