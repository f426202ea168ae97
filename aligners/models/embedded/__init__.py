"""Embedded models: small ones, trained from a seed on first use."""
