"""Callbacks that watch a run: each site's best state, checkpoints, interruptions, the summary of a fit."""
