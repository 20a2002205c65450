"""Grammars that answers may keep to, for the engine to ask (`engine/grammar.py`)."""
