"""What watches a run: the best state of each site, checkpoints, the summary of a fit."""
