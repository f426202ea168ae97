"""The report of a study: the papers' tables and figures, made of the tables that the study collected."""
