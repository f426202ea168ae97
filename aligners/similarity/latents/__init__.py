"""What two models share, latent by latent of a dictionary of both: sums over texts, controls and verdicts."""
