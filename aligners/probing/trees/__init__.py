"""Structural probes: whether a linear map of the states lays out a sentence's tree."""
