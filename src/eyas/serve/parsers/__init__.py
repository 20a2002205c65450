"""Parsers of answers: reasoning, content and tool calls, in the formats of the models."""
