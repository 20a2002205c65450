"""Calls between markers of their own, with the arguments as plain JSON: what deepseek_v3 and kimi_k2 have in common."""

from dataclasses import dataclass

from eyas.serve.parsers.base import BLANK, MAX_BLANKS, Markers, ToolParser, is_name


@dataclass(frozen=True, kw_only=True)
class CallMarkers:
    """The markers of a format: all calls stand in a section, each has a header and arguments."""

    section_begin: str
    call_begin: str
    separator: str
    """Between header and arguments."""
    call_end: str
    section_end: str

    @property
    def all(self) -> tuple[str, ...]:
        """Every marker."""
        return (self.section_begin, self.call_begin, self.separator, self.call_end, self.section_end)


class DelimitedCallParser(ToolParser):
    """Parses one answer. The header is the name."""

    held = BLANK
    """Characters at the end of arguments that are held back, since they may belong to the format."""

    def __init__(self, markers: CallMarkers, *, max_calls: int | None) -> None:
        super().__init__(max_calls=max_calls)
        self.openings = (markers.section_begin, markers.call_begin)
        self._marks = markers
        self._markers = Markers(*markers.all)
        self._tail = ""
        self._has_arguments = False

    def named(self, header: str) -> tuple[str, str | None] | None:
        """The function's name and the call's id, if the format has one; None if this is no header."""
        name = header.strip(BLANK)
        return (name, None) if is_name(name) else None

    def trimmed(self, end: str) -> str:
        """The held end of the arguments without what belongs to the format."""
        return end.rstrip(BLANK)

    def _start(self) -> bool:
        """Text, also between calls. Markers out of place are dropped: they are no text of the model's."""
        marker = self._pass_text(self._markers)
        if marker == self._marks.call_begin:
            self._state = self._in_header
        return marker is not None

    def _in_header(self) -> bool:
        before = self._at
        taken = self._take_header(self._markers)
        if taken is None:
            return False
        header, marker = taken
        named = self.named(header) if marker else None
        if named is None:  # it is text, to be read as such
            self._at, self._state = before, self._start
            return True
        self._start_call(*named)
        self._begin_arguments()
        if marker != self._marks.separator:
            self._end_call(marker)
        return True

    def _begin_arguments(self) -> None:
        self._tail, self._has_arguments = "", False
        self._state = self._in_arguments

    def _in_arguments(self) -> bool:
        before, marker = self._take_until(self._markers)
        text = self._tail + (before if self._has_arguments else before.lstrip(BLANK))
        end = max(len(text.rstrip(self.held)), len(text) - MAX_BLANKS)
        self._tail = text[end:]
        self._has_arguments = self._has_arguments or bool(text)
        self._add_arguments(text[:end])
        if marker is not None:
            self._end_call(marker)
        return marker is not None

    def _end_call(self, marker: str) -> None:
        self._add_arguments(self.trimmed(self._tail) if self._has_arguments else "{}")
        # Where the end of a call is missing, the next one begins.
        self._state = self._in_header if marker == self._marks.call_begin else self._start
