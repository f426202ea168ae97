"""The command lines of `train.py` and `evaluate.py`."""
