"""Token ids from a text and the texts of its tokens, where these leave no choice.

A server that tells no ids may still tell how its text is cut into tokens (`logprobs`). The tokenizer's own ids of the
text are those, if they are cut in the same places and no other token could stand at any of them.
"""

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What a part of a character reads as; many tokens read so."""


class TokenNames:
    """The tokens of a tokenizer by what they read as alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def find_ids(self, text: str, names: Sequence[str], before: int) -> tuple[int, ...] | None:
        """The ids of `text`, cut into `names`, behind the token `before`; None if they are not certain."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != len(names) or "".join(names).find(UNFINISHED) >= 0:
            return None
        for id_, name in zip(ids, names, strict=True):
            if self._read(id_) != name:
                return None
            # Tokens of one name may read apart behind another: with a space, where words carry theirs.
            pair = self._read(before, id_)
            if any(other != id_ and self._read(before, other) == pair for other in self._ids_by_name[name]):
                return None
            before = id_
        return tuple(ids)

    def _read(self, *ids: int) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def _ids_by_name(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for id_ in sorted(self._tokenizer.get_vocab().values()):
            found.setdefault(self._read(id_), []).append(id_)
        return found
