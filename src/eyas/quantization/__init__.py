"""Quantised checkpoints as they are published, of targets and drafters: what config.json says, and their tensors."""
