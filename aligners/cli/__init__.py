"""The command lines of `train.py`, `evaluate.py` and `study.py`."""
