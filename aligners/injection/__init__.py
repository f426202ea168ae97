"""Mapped states put into a frozen model: methods, floors, ceilings, and the evaluation of them all."""
