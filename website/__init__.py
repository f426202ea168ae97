"""What makes the documentation site of the pages in docs/: tables and pages that are generated when it is built."""
