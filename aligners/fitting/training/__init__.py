"""Gradient steps: how many, how fast, in which precision, and what stops a site that diverges."""
