"""What changed between two models that read the same text: their function, their states site by site, their weights."""
