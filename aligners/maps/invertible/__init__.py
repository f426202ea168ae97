"""What invertible networks are built of."""
