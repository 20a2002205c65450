"""Answers that keep to a grammar."""
