"""Other servers as eyas asks them: where they are, which model they serve, and what to do when they go away."""
