"""Sparse dictionaries of the states of one model, or of several with one code."""
