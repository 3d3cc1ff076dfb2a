"""What `import fedbilevel` offers beside the parts of a problem: calls that solve one, and what they give back."""
