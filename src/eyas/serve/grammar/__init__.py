"""Structured outputs: untrusted grammars, bounded, tried in a process of their own, compiled."""
