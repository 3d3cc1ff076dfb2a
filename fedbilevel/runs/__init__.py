"""Runs: their options, the experiment, its folder, and sweeps and reproductions made of many."""
