"""What a finished run keeps of its maps: one format, whatever trained them."""
