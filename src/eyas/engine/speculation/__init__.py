"""Choosing draft depths. No torch."""
