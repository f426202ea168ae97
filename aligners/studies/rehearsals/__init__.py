"""Rehearsals of studies: tiny models, generated texts and few steps in place of what a study asks for."""
