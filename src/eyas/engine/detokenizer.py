"""Incremental detokenization: which text can be shown already, and where a stop string ends the answer.

Text is held back while it may still change: bytes of an unfinished character, and a possible beginning of a stop
string. A stop string itself is shown only on request.
Invariant: the texts joined equal the text of all tokens, cut before the earliest stop string, or behind it.
"""

from collections.abc import Callable, Sequence
from functools import partial

UNFINISHED = "\ufffd"


class TextStream:
    """Detokenizes one answer token by token."""

    def __init__(
        self,
        decode: Callable[[tuple[int, ...]], str],
        stop_strings: Sequence[str] = (),
        *,
        include_stop: bool = False,
        behind: Callable[[int, int], str] | None = None,
    ) -> None:
        """`behind` may be a cached version of `text_behind` for this `decode`."""
        self._decode = decode
        self._behind = behind or partial(text_behind, decode)
        self._stops, self._include_stop = tuple(stop_strings), include_stop
        self.stop_string: str | None = None
        """The stop string that ended the answer."""
        self._tokens: list[int] = []
        # Tokens from _anchor to _shown are decoded again with each new token, because a token's text may depend on the
        # one before it (a leading space, a character in several tokens).
        self._anchor, self._shown = 0, 0
        self._last: int | None = None
        """The only token of that range, if it is one and nothing is held back: the common case, with a fast path."""
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that can no longer change; cut at a stop string."""
        assert not self.stopped, "the answer has ended"
        self._tokens.append(token)
        if self._last is not None:
            text = self._behind(self._last, token)
            if not text:
                self._last = None
                return ""
            self._last, self._anchor = token, self._shown
            self._shown += 1
            return self._release(text) if self._stops else text
        before = self._decode(tuple(self._tokens[self._anchor : self._shown]))
        text = self._decode(tuple(self._tokens[self._anchor :]))
        if text.endswith(UNFINISHED) or len(text) <= len(before):
            return ""
        self._anchor, self._shown = self._shown, len(self._tokens)
        self._last = token if self._shown == self._anchor + 1 else None
        return self._release(text[len(before) :])

    def finish(self) -> str:
        """Return the text held back, when no token follows."""
        if self.stopped:
            return ""
        before = self._decode(tuple(self._tokens[self._anchor : self._shown]))
        text = self._held + self._decode(tuple(self._tokens[self._anchor :]))[len(before) :].rstrip(UNFINISHED)
        self._held, self._anchor, self._shown = "", len(self._tokens), len(self._tokens)
        self._last = None
        return text

    def _release(self, new: str) -> str:
        if not self._stops:
            return new
        text = self._held + new
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            at, self.stop_string = min(ends)
            self.stopped, self._held = True, ""
            return text[: at + len(self.stop_string)] if self._include_stop else text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def text_behind(decode: Callable[[tuple[int, ...]], str], last: int, token: int) -> str:
    """Text of a token behind another; empty if it may still change."""
    before, text = decode((last,)), decode((last, token))
    return "" if text.endswith(UNFINISHED) else text[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
