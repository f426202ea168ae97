"""The tables and figures of the papers, a module for each paper, and the papers' own numbers."""
