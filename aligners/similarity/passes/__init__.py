"""Which pairs of models are summed in which pass over the texts, within a limit of memory, and what a pass keeps."""
