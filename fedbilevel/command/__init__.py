"""The command `fedbilevel`: a file for each group of verbs."""
