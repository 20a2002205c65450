"""Texts that an answer may not have, as the token sequences that a tokenizer makes of them."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from eyas.errors import UserError


def bad_word_tokens(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text and as it follows a space, which most vocabularies write with other tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        if not bare:
            raise UserError(f"bad_words has {word!r}, which is no word; drop it")
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)
