"""Pure functions behind the measures."""
