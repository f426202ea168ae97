"""Edge probes: labels of a span of words, or of two."""
