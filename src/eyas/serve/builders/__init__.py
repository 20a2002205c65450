"""From request bodies to engine requests, and from engine outputs to responses."""
