"""Ways to carry messages between the server and the clients."""
