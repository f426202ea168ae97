"""The commands of `train.py`, each a module with `parser` and `run`."""
