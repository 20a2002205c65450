"""Drafts without a drafter: what followed the like of a request's text before."""
