"""Text: where it comes from, how it is split and labelled, and what was fitted on it."""
