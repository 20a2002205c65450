"""Draft tokens without a drafter: continuations of earlier occurrences of the same text."""
