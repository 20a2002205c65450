"""How many tokens a drafter saves: acceptance length, measured by decoding and estimated on text."""
