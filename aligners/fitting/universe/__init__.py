"""One space for k models, with a bijection from each model into it."""
