"""Numbers in, numbers out: plain tensors, no requests."""
