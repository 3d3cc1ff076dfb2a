"""Data sets: `datasets` names and loads them, `fetch` downloads them, one file reads each format."""
