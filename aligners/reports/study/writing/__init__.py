"""Tables and figures of a study as files: HTML, LaTeX, Markdown, CSV."""
