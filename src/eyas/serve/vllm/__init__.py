"""vLLM as the engine of eyas' server: command line, process, requests and answers."""
