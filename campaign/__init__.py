"""A campaign against the package: malformed inputs, library calls and kills, each of which must end well or in one line."""
