"""Maps between rows that are not paired: matched by the structure of each side alone."""
