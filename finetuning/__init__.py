"""Classifiers that train: fine-tuning with blocks frozen or left out, heads on truncated models."""
