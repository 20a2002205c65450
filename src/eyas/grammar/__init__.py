"""Grammars for structured output, as the engine uses them (`engine/grammar.py`)."""
