"""What changed between two models that read the same text: their answers, their states site by site, their weights."""
