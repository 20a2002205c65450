"""The Llama block, fused."""
