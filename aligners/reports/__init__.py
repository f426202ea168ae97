"""Reports: tables, figures and sentences, on disk, on screen and at W&B."""
