"""Conversations as token ids and masks, laid out in packs."""
