"""Answers kept to learn from (`eyas serve --learn`): whose, in which form, and where."""
