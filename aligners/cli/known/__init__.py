"""What is known of a command before its parser is made: as it was described, and kept."""
