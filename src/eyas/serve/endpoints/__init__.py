"""What a route does."""
