"""The commands of `evaluate.py`, each a function with options: see `Command`."""
