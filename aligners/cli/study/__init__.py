"""The commands of `study.py`, each a module with `parser` and `run`."""
