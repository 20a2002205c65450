"""Code that runs inside vLLM: this folder is on its path, and imports nothing of eyas."""
