"""Maps between the hidden states of two models."""
