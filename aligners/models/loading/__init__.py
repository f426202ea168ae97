"""Loading and keeping pretrained models."""
