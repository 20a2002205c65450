"""What the target would have generated to say an assistant's message, as text.

Templates render a finished turn, but the target begins where the generation prompt ends. Mostly the rendering begins
with that prompt, and the rest of it is the answer. Many templates open a turn otherwise than they render it: the prompt
opens or closes a block of reasoning, a rendered turn has an empty one that nobody said, reasoning is left out of
earlier turns, a channel or a header stands before the content. So the template is asked with marks in place of the
reasoning and of the content, and what it writes around the marks is compared with the prompt.

Invariants: reasoning and content are taken as the record has them, however the template trims them; an opening that the
prompt has already is not said again; a block of reasoning that the record does not have is not said at all.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from eyas.data.conversations import Message
from eyas.target.chat_template import REASONING_NAMES, TEMPLATE_ERRORS

Render = Callable[[Sequence[Message], bool], str]
"""Messages and whether the text ends with the generation prompt, by the template; raises `TEMPLATE_ERRORS`."""

REASONING_FIELDS = (*REASONING_NAMES, "thought")
"""What records and templates call it."""

# Marks that no text and no template has.
_REASONING, _CONTENT, _NEXT, _CALL = "Rmark7Q", "Cmark7Q", "Nmark7Q", "fmark7Q"

_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s][^\[\]\n]*\]")
_CLOSING_TAG = re.compile(r"</[\w:]*think[\w:]*>|\[/[\w:]*think[\w:]*\]", re.IGNORECASE)
_UNFINISHED_MARKER = re.compile(r"(<[^<>\s]*|\[[^\[\]\s]*)$")


@dataclass(frozen=True, kw_only=True)
class SpokenAnswer:
    """A prompt and what is said behind it."""

    prompt: str
    text: str
    stop: str
    """The stop token behind the text; empty if none is known."""


@dataclass(frozen=True, kw_only=True)
class ReasoningTags:
    """How a template marks reasoning."""

    opening: str
    closing: str
    before: str
    """The opening with the blanks around it."""
    behind: str
    """What stands between reasoning and content."""
    separable: bool = True
    """Whether the closing is a marker of its own; otherwise it begins what stands before the content."""

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends within reasoning."""
        return prompt.rstrip().endswith(self.opening)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends behind reasoning: thinking is turned off."""
        return prompt.rstrip().endswith(self.closing)

    def all_of(self, text: str) -> bool:
        """Whether the text has nothing but tags."""
        return not text.replace(self.closing, "").replace(self.opening, "").strip()

    def without_empty_block(self, text: str) -> str:
        """The text without an empty block, or the end of one, at its beginning."""
        if not self.separable:
            return text
        pattern = rf"\s*({re.escape(self.opening)}\s*)?{re.escape(self.closing)}\s*"
        return re.sub(rf"\A{pattern}", "", text)


class AnswerWriter:
    """Writes messages as the target would have generated them, for one template with its variables and tools."""

    def __init__(
        self,
        render: Render,
        tags: Callable[[], ReasoningTags | None],
        *,
        stops: Sequence[str],
        specials: Sequence[str],
        eos: str,
    ) -> None:
        """`tags` are asked for only where they matter; `eos` ends answers behind which the template writes nothing."""
        self._render, self._find_tags = render, tags
        self._stops, self._specials, self._eos = stops, specials, eos

    def write(
        self, before: Sequence[Message], message: Message, *, next_role: str | None, finished: bool
    ) -> SpokenAnswer:
        """The answer `message` behind `before`; `next_role` speaks next, if anybody does.

        Of an answer that is not finished, nothing stands behind what the record has.
        """
        prompt = self._render(before, True)
        reasoning, content, calls = reasoning_of(message), text_of(message), message.get("tool_calls")
        if reasoning and ((tags := self.tags) is None or tags.closed_by(prompt)):
            reasoning = ""  # the template has no place for it, or the prompt says that there is none
        marked = self._marked(message, reasoning=_REASONING if reasoning else "", content=_CONTENT if content else "")
        written = self._render([*before, marked], False)
        unwritten = bool(reasoning) and _REASONING not in written
        if unwritten:
            marked = self._marked(message, content=_CONTENT if content else "")
            written = self._render([*before, marked], False)
        if content and _CONTENT not in written:
            if not calls:
                raise ValueError("it leaves out what the assistant says")
            content = ""  # beside calls some templates have no place for it
        if unwritten:
            said, rest = self._unwritten_reasoning(before, prompt, written, reasoning, content)
            if not (finished or content or calls):
                said = said.removesuffix(self.tags.behind if self.tags else "")
        elif reasoning:
            lead, rest = written.split(_REASONING, 1)
            reasoning = self._without_opening(prompt, lead, reasoning)
            lead = self._said_before(before, prompt, lead)
            said = lead + _behind(lead or prompt, reasoning)
            if content:
                between, _, rest = rest.partition(_CONTENT)
                said = _join(_join(said, between), content)
        elif content:
            lead, _, rest = written.partition(_CONTENT)
            content = self._without_opening(prompt, lead, content)
            said = self._without_empty_block(self._said_before(before, prompt, lead)) + content
        else:
            said, rest = "", self._without_empty_block(self._behind_opening(before, prompt, written))
        if not finished and not calls:
            return SpokenAnswer(prompt=prompt, text=said, stop="")
        if reasoning and not (content or calls) and self.tags is not None and self.tags.closing in rest:
            end = rest.index(self.tags.closing) + len(self.tags.closing)
            said, rest = said + rest[:end], rest[end:]
        elif not (reasoning or content or calls):  # the target stops at once
            place, stop = _first(self._stops, rest)
            rest = rest[place:] if stop else rest
        return self._ended(before, marked, SpokenAnswer(prompt=prompt, text=said, stop=""), rest, next_role, finished)

    @property
    def tags(self) -> ReasoningTags | None:
        """How the template marks reasoning; None if it has no place for any."""
        return self._find_tags()

    def _marked(self, message: Message, *, content: str, reasoning: str = "") -> dict[str, Any]:
        marked = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
        # An empty content stays as it is: some templates tell null from "".
        marked |= {"content": content} if content else {}
        return _with_reasoning(marked, reasoning)

    def _unwritten_reasoning(
        self, before: Sequence[Message], prompt: str, written: str, reasoning: str, content: str
    ) -> tuple[str, str]:
        """What is said with reasoning that the template leaves out here, and what it writes behind it."""
        assert self.tags is not None
        opened = self.tags.opened_by(prompt)
        said = "" if opened else self.tags.before
        said += _behind(said or prompt, self._without_opening(prompt, prompt, reasoning))
        if _CONTENT not in written:
            return _join(said, self.tags.behind), self._without_empty_block(
                self._behind_opening(before, prompt, written)
            )
        lead, rest = written.split(_CONTENT, 1)
        lead = self._without_empty_block(self._said_before(before, prompt, lead))
        return _join(_join(said, self.tags.behind) + lead, content), rest

    def _said_before(self, before: Sequence[Message], prompt: str, lead: str) -> str:
        """The part of `lead`, which a rendering has before what is said, that the target generates: not the prompt."""
        if lead.startswith(prompt):
            return lead[len(prompt) :]
        if prompt.startswith(lead):
            return ""
        common = _common_opening(prompt, lead)
        # Only the reasoning is opened or closed otherwise: what else the rendering has is said.
        if self.tags is not None and self.tags.all_of(prompt[len(common) :]):
            return lead[len(common) :]
        # Something earlier is written otherwise: look for the generation prompt itself.
        opening = prompt.removeprefix(self._render(before, False))
        place = lead.rfind(opening) if opening.strip() and opening != prompt else -1
        return lead[place + len(opening) :] if place >= 0 else ""

    def _behind_opening(self, before: Sequence[Message], prompt: str, written: str) -> str:
        """What a rendering without content has behind the opening of the turn."""
        if written.startswith(prompt):
            return written[len(prompt) :]
        common = len(_common_opening(prompt, written))
        if self.tags is not None and self.tags.all_of(prompt[common:]):
            return written[common:]
        probe = self._attempt([*before, {"role": "assistant", "content": _CONTENT}])
        lead = probe.partition(_CONTENT)[0] if probe and _CONTENT in probe else ""
        if len(lead) > common and written.startswith(lead):
            return written[len(lead) :]
        # Something earlier is written otherwise: the turn begins behind the marker that ends the prompt.
        markers = [marker[0] for marker in _MARKER.finditer(prompt) if marker.end() == len(prompt.rstrip())]
        place = written.rfind(markers[0]) + len(markers[0]) if markers and markers[0] in written else 0
        return written[max(place, common) :]

    def _without_empty_block(self, text: str) -> str:
        """Without the block of reasoning that the template writes where the record has none."""
        return text if not text or self.tags is None else self.tags.without_empty_block(text)

    def _without_opening(self, prompt: str, lead: str, text: str) -> str:
        """What is said, without an opening that the prompt has already."""
        opening = prompt[len(lead) :].strip() if prompt.startswith(lead) else ""
        if self.tags is not None and self.tags.opened_by(prompt):
            opening = self.tags.opening
        if not opening or not text.lstrip().startswith(opening):
            return text
        return _behind(prompt, text.lstrip()[len(opening) :])

    def _ended(
        self,
        before: Sequence[Message],
        marked: Message,
        answer: SpokenAnswer,
        rest: str,
        next_role: str | None,
        finished: bool,
    ) -> SpokenAnswer:
        """The answer with what the template writes behind it, up to the stop token."""
        # A stop token before a call that the record has did not stop the target.
        called = max([rest.rfind(name) + len(name) for name in call_names(marked) if name in rest], default=0)
        place, stop = _first(self._stops, rest, called)
        if not stop and not called:
            place, stop = self._last_of_specials(rest)
        if stop:
            text = answer.text + rest[:place]
        else:
            blanks, stop = self._look_ahead(before, marked, next_role)
            text = answer.text + rest + ("" if rest.endswith(blanks) else blanks)
            if not stop and (called or not rest):
                stop = self._eos
        return SpokenAnswer(prompt=answer.prompt, text=text, stop=stop if finished else "")

    def _last_of_specials(self, rest: str) -> tuple[int, str]:
        """The last special token of a text that has nothing else: an end that nobody names as a stop token."""
        left = rest
        for token in self._specials:
            left = left.replace(token, "")
        if left.strip():
            return -1, ""
        places = [(rest.rfind(token), token) for token in self._specials if token in rest]
        return max(places, default=(-1, ""))

    def _look_ahead(self, before: Sequence[Message], marked: Message, next_role: str | None) -> tuple[str, str]:
        """The stop token that comes with the next turn, and the blanks before it: some templates write it there."""
        calls = marked.get("tool_calls") or []
        for role in [next_role] if next_role else ["tool", "user"] if calls else ["user"]:
            spoken: dict[str, Any] = {"role": role, "content": _NEXT}
            if role == "tool" and calls:
                spoken |= {"tool_call_id": calls[-1].get("id"), "name": calls[-1]["function"]["name"]}
            text = self._attempt([*before, marked, spoken])
            if text is None or _NEXT not in text:
                continue
            last = self._attempt([*before, marked]) or ""
            end = text.index(_CONTENT) + len(_CONTENT) if _CONTENT in text else _common(text, last)
            behind = text[end : text.index(_NEXT)]
            place, stop = _first(self._stops, behind)
            if stop:
                return behind[len(behind[:place].rstrip()) : place], stop
        return "", ""

    def _attempt(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render(messages, False)
        except TEMPLATE_ERRORS:
            return None


def find_tags(render: Render, source: str) -> ReasoningTags | None:
    """Ask a template in several ways to write reasoning, until it does."""
    user = {"role": "user", "content": "Hello"}
    call = {"id": "call00000", "type": "function", "function": {"name": _CALL, "arguments": {}}}

    def attempt(message: Mapping[str, Any] | None) -> str | None:
        try:
            return render([user] if message is None else [user, message], message is None)
        except TEMPLATE_ERRORS:
            return None

    prompt = attempt(None)
    if prompt is None:
        return None
    plain: dict[str, Any] = {"role": "assistant", "content": _CONTENT}
    blocks = [{"type": "thinking", "thinking": _REASONING}, {"type": "text", "text": _CONTENT}]
    for extra in ({}, {"tool_calls": [call]}):
        written, bare = attempt(_with_reasoning(plain, _REASONING) | extra), attempt(plain | extra)
        if found := _tags_of(prompt, written, bare):
            return found
        in_blocks = attempt(plain | extra | {"content": blocks}) or ""
        if re.search(r"""["']thinking["']""", in_blocks) is None and (found := _tags_of(prompt, in_blocks, bare)):
            return found  # and not the list itself as text
    named = _CLOSING_TAG.search(source)
    if named is None:
        return None
    closing, opening = named[0], named[0].replace("/", "", 1)
    # These models write a newline behind the opening and before the closing, or none at all.
    blank = "\n" if re.search(re.escape(opening) + r"(\n|\\n)", source) else ""
    return ReasoningTags(
        opening=opening, closing=closing, before=opening + blank, behind=f"{blank}{closing}{blank}{blank}"
    )


def _tags_of(prompt: str, written: str | None, bare: str | None) -> ReasoningTags | None:
    """The tags in a rendering with reasoning, beside the prompt and the same rendering without reasoning."""
    if written is None or bare is None or _REASONING not in written:
        return None
    lead, _, rest = written.partition(_REASONING)
    behind = rest.partition(_CONTENT)[0]
    if _CONTENT not in rest or _CALL in behind:  # the call comes first: what both renderings end with is no tag
        behind = rest[: len(rest) - _common(rest[::-1], bare[::-1])]
    marker = _MARKER.search(behind)
    separable = marker is None or not behind[marker.end() : marker.end() + 1].isalnum()
    closing = marker[0] if marker and separable else behind.strip()
    if not closing:
        return None
    opening = closing.replace("/", "", 1)
    if opening == closing or not lead.rstrip().endswith(opening):
        header = min((_common_opening(text, lead) for text in (prompt, bare)), key=len)
        opening = lead[len(header) :].strip() or lead.strip().rsplit("\n", 1)[-1]
    place = lead.rfind(opening)
    blanks = lead[len(lead[:place].rstrip()) : place]
    if prompt.endswith(blanks):
        blanks = ""
    return ReasoningTags(
        opening=opening, closing=closing, before=blanks + lead[place:], behind=behind, separable=separable
    )


def reasoning_of(message: Message) -> str:
    """The reasoning that a message has beside its content."""
    return next((value for name in REASONING_FIELDS if isinstance(value := message.get(name), str) and value), "")


def _with_reasoning(message: Mapping[str, Any], reasoning: str) -> dict[str, Any]:
    """A message with reasoning under every name (rendering adds those that the server passes)."""
    return {**message, "reasoning_content": reasoning, "thought": reasoning} if reasoning else dict(message)


def call_names(message: Message) -> list[str]:
    """The functions that a message calls."""
    return [call["function"]["name"] for call in message.get("tool_calls") or ()]


def text_of(message: Message) -> str:
    """The content of a message as text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return content or ""


def _common_opening(one: str, other: str) -> str:
    """What both texts begin with; a marker that they share only the beginning of is no part of it."""
    common = one[: _common(one, other)]
    if common in (one, other):
        return common
    return _UNFINISHED_MARKER.sub("", common)


def _common(one: str, other: str) -> int:
    """How many characters both texts begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _first(tokens: Sequence[str], text: str, start: int = 0) -> tuple[int, str]:
    """The first of these tokens in a text, the longest where several begin, and where it is."""
    places = [(place, -len(token), token) for token in tokens if (place := text.find(token, start)) >= 0]
    return (min(places)[0], min(places)[2]) if places else (-1, "")


def _behind(left: str, right: str) -> str:
    """`right` without the blanks that `left` ends with already."""
    blanks = right[: len(right) - len(right.lstrip())]
    for size in range(len(blanks), 0, -1):
        if left.endswith(blanks[:size]):
            return right[size:]
    return right


def _join(left: str, right: str) -> str:
    """One behind the other; blanks that both have at the seam count once."""
    return left + _behind(left, right)
