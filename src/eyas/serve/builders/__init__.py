"""Request bodies to engine requests, and engine outputs to responses."""
