"""Bridges to other programs, each an optional extra."""
