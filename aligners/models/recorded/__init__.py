"""States that were recorded elsewhere, in place of a model that would make them."""
