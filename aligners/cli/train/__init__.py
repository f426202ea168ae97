"""The commands of `train.py`, each a function with options: see `Command`."""
