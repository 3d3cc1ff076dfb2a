"""The problem, its clients and what crosses between them and the server."""
