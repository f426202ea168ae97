"""The report of truncated classifiers."""
