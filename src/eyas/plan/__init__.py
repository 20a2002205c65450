"""Memory and speed of a target with its drafter, planned from configurations alone. No torch in this package."""
