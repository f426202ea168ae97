"""Text that a language model generates while states at a site are changed, and what steering does and costs."""
