"""What runs inside vLLM: this folder is put on its path, and imports nothing of eyas."""
