"""Training classifiers: fine-tuning with blocks frozen or left out, and heads on truncated models."""
