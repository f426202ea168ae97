"""Measures between paired representations, and the moments they share."""
