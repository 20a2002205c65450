"""Decoding. `reference.py` is the oracle: the algorithm in its plainest form, against which fast code is tested."""
