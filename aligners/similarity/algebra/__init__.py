"""What measures are computed from: moments, tiles and folds of paired rows."""
