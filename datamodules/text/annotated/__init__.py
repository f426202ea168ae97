"""Texts with annotations of their words: trees from CoNLL-U, labelled spans from JSON lines, a grammar of our own."""
