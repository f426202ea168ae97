"""The report on what is encoded in states, layer by layer."""
