"""Where features come from: the target itself, or a disk that remembers it."""
