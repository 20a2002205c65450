"""Training: from a target and conversations to a drafter. So far: conversations and their loss masks."""
