"""How deep to draft, and why. No torch."""
