"""States of a target that vLLM servers run."""
