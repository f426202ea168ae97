"""The commands of `study.py`, each a function with options: see `Command`."""
