"""What is known of a command without making its parser: its description, cached."""
