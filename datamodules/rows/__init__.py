"""Rows: which positions at which sites are paired, and the type of each."""
