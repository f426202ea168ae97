"""The cells of a study as calls of commands: their options, what can be checked beforehand, and one call."""
