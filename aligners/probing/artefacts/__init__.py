"""Artefacts: what people have built on a model's hidden states, and how to carry it to another model."""
