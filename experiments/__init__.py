"""One script a question; each prints a table."""
