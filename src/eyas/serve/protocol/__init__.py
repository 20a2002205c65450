"""Request bodies: fields, limits and validation."""
