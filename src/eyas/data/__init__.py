"""Conversations on disk and as token ids: what training, evaluation and the doctor read, and `data answer` writes."""
