"""Layers trained through frozen tails."""
