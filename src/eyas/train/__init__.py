"""Training: from a target and conversations to a drafter."""
