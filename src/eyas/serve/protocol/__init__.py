"""Request bodies: their fields, their bounds, and what is refused."""
