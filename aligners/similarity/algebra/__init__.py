"""What measures are computed of: moments, tiles and folds of paired rows."""
