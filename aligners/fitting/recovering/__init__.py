"""Recovering a known map: random invertible networks of a model's own states as the target."""
