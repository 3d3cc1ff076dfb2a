"""The papers' tables and figures: what each is, running it, and ours beside the paper's."""
