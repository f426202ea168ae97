"""Runs at W&B: how they begin and go on, what they were made from and leave, and a view of them all."""
