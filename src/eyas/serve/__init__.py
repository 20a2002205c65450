"""An OpenAI-compatible server around the engine: HTTP in, pieces out, and everything that keeps it running."""
