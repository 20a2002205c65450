"""Decoding: many requests, one target, one drafter. docs/architecture.md follows a request through these files."""
