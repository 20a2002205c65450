"""vLLM as the engine behind eyas' server: its command line, its process, requests to it and answers from it."""
