"""Access control, and the record of refused requests."""
