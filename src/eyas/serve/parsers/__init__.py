"""Parsers of answers: reasoning, content and tool calls, by the formats that models write them in."""
