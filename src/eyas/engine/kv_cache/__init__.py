"""KV cache blocks and their ownership."""
