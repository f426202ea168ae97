"""The price of a bijection, and the recovery of known maps."""
