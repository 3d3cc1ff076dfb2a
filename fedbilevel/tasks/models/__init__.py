"""Models as pytrees and functions."""
