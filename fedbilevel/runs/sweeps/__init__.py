"""Many runs of one algorithm on one task: seeds and grids of hyperparameters, run as one program."""
