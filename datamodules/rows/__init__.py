"""Rows: which positions of which sites are paired, and of which type each is."""
