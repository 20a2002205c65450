"""Attention over blocks of keys and values."""
