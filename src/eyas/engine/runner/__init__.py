"""Runs target and drafter: passes, CUDA graphs, hidden states."""
