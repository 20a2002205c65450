"""Structured outputs: grammars of strangers, bounded, tried in a process of their own, compiled."""
