"""Texts as models read them: tokenised, marked, masked, packed, and divided into words."""
