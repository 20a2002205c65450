"""Conversations as rows of ids and masks, laid out in packs: what training reads, and what `data check` tells of it."""
