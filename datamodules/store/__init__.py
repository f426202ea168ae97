"""States of models on disk: computed once, read by everything."""
