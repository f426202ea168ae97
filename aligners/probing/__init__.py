"""Probes: what can be read off frozen states."""
