"""Text in, batches out: the LightningDataModules and their parts."""
