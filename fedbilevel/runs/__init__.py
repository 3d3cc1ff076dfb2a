"""Runs: their options, the experiment, its folder, and sweeps and reproductions, which consist of many runs."""
