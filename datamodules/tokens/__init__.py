"""Texts as models read them: as tokens, marked, masked, packed, and their words found again."""
