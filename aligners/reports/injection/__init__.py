"""The report of an injection."""
