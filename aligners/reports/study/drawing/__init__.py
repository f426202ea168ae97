"""Figures of a study drawn from their values: as images, and with values under the pointer."""
