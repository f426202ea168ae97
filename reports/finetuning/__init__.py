"""The report of a fine-tuning."""
