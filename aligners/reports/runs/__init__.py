"""The reports of runs: a module or a folder for each kind, as named in `kinds.yaml`."""
