"""Keeps answers (`eyas serve --learn`) and adapts the drafter to them."""
