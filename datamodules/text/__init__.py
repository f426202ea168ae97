"""Text: where it comes from, how it is split, labelled and tokenised."""
