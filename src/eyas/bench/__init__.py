"""Measures any OpenAI-compatible server over HTTP: how fast it answers, what drafting yields, and what it costs."""
