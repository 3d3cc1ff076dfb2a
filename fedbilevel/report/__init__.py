"""What came of runs, to look at: a table in the terminal, pictures, and a page."""
