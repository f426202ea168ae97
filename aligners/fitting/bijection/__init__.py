"""What a bijection costs, and maps that are recovered where one is known."""
