"""The commands of `evaluate.py`, each a module with `parser` and `run`."""
