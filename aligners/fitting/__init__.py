"""Fitting maps to paired rows: moments, then gradient steps."""
