"""The results of runs: a table in the terminal, pictures, and a page."""
