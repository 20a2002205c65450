"""Decoding of many requests with one target and one drafter. docs/architecture.md follows a request through it."""
