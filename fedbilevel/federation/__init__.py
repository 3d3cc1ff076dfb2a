"""Real federations: one process per site, over mutual TLS, on NVIDIA FLARE."""
