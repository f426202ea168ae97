"""What watches a run: the best state of each site, checkpoints on interruption, figures, tables, reports."""
