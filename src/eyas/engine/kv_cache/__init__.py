"""Keys and values in blocks, and who owns which."""
