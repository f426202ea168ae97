"""Studies: many models, tasks, pairs and maps from one file, cell by cell."""
