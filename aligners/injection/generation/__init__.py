"""Text that a language model generates while states at a site are changed, and the effects and costs of steering."""
