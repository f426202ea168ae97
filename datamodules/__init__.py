"""Text in, batches out: the LightningDataModules, and what they are made of."""
