"""From tokens to text, piece by piece: what may be shown already, and where a stop string ends the answer.

Text is held back while it can still change: the bytes of an unfinished character, and whatever could be the
beginning of a stop string. A stop string itself is shown only if it was asked for.
Invariant: the pieces joined are the text of all tokens pushed, cut before the earliest stop string, or behind it.
"""

from collections.abc import Callable, Sequence
from functools import partial

UNFINISHED = "\ufffd"


class TextStream:
    """The text of one answer as its tokens come."""

    def __init__(
        self,
        decode: Callable[[tuple[int, ...]], str],
        stop_strings: Sequence[str] = (),
        *,
        include_stop: bool = False,
        behind: Callable[[int, int], str] | None = None,
    ) -> None:
        """`behind` may stand for `text_behind` with this `decode`, and remember what it said."""
        self._decode = decode
        self._behind = behind or partial(text_behind, decode)
        self._stops, self._include_stop = tuple(stop_strings), include_stop
        self.stop_string: str | None = None
        """The one that ended the answer."""
        self._tokens: list[int] = []
        # Tokens from _anchor to _shown are decoded again with each new one, because the text of a token may depend
        # on the one before it (a leading space, a character in several tokens); only what follows them is new.
        self._anchor, self._shown = 0, 0
        self._last: int | None = None
        """The one token that these are, if so, and nothing behind it is held back: the usual case, with a short way."""
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one more token and return the text that can no longer change; nothing after a stop string."""
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
        """What was held back, once it is certain that nothing follows."""
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
    """The text of a token behind another; nothing, if it can still change."""
    before, text = decode((last,)), decode((last, token))
    return "" if text.endswith(UNFINISHED) else text[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """How long an end of `text` is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
