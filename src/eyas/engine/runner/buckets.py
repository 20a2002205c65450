"""The shapes that captured passes come in: few, since capturing one takes as long as dozens of replays."""

from eyas.plan.footprint import LONGEST_CHUNK

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 1025, 64))
"""Requests of a step."""
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Tokens of a request, the newest and its drafts: where the controller chooses, drafts are one of these deep, less
one."""
USUAL_BLOCKS = 512
"""Of a request: 8,192 tokens in blocks of 16. A table costs what is read by it, so most engines have one width."""
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096, LONGEST_CHUNK)
"""Tokens of prompts that are read together."""
CHUNK_ROWS = (1, 8, 64, 256, 1024)
"""Prompts that are read together."""
