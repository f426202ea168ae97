"""Reports on updates of models: what changed, what was carried over, steering, and generated text."""
