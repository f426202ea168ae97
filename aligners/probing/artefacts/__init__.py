"""Artefacts: what people own in a model's hidden states, and carrying it to another model."""
