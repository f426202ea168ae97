"""How well a model answers: losses, scores and their intervals, kept text by text."""
