"""The report of a comparison of layers."""
