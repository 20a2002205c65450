"""A target answers prompts: by an engine on this machine, or by servers elsewhere."""
