"""An index that survives its model: maps between old and new vectors, and what a search through them finds."""
