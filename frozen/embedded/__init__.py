"""The embedded models: small ones, trained from a seed the first time they are asked for."""
