"""Quantised checkpoints as they are published: what config.json says, and how the tensors of a module are read."""
