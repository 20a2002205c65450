"""Sources of features: the target itself, vLLM servers, or a cache on disk."""
