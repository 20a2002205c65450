"""Text that the target would have generated for an assistant's message.

A chat template renders finished turns, but the target begins where the generation prompt ends. Usually the rendering
begins with that prompt, and the rest is the answer. Many templates render a turn differently: the prompt opens or
closes a reasoning block, a rendered turn has an empty block that was not generated, reasoning is dropped from earlier
turns, a channel or header precedes the content. Therefore the template is rendered with marks in place of reasoning and
content, and the text around the marks is compared with the prompt.

Invariants: reasoning and content are those of the record, however the template trims them; an opening that the prompt
already has is not repeated; a reasoning block that the record lacks is left out.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from eyas.data.conversations import Message
from eyas.target.chat_template import REASONING_NAMES, TEMPLATE_ERRORS

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with or without the generation prompt; raises `TEMPLATE_ERRORS`."""

REASONING_FIELDS = (*REASONING_NAMES, "thought")
"""Names of the reasoning in records and templates."""

# Marks that occur in no text and no template.
_REASONING, _CONTENT, _NEXT, _CALL = "Rmark7Q", "Cmark7Q", "Nmark7Q", "fmark7Q"

_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s][^\[\]\n]*\]")
_CLOSING_TAG = re.compile(r"</[\w:]*think[\w:]*>|\[/[\w:]*think[\w:]*\]", re.IGNORECASE)
_UNFINISHED_MARKER = re.compile(r"(<[^<>\s]*|\[[^\[\]\s]*)$")


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """A prompt and the answer that the target generates after it."""

    prompt: str
    text: str
    stop: str
    """The stop token after the text; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class ReasoningTags:
    """How a template marks reasoning."""

    opening: str
    closing: str
    before: str
    """The opening tag with the whitespace around it."""
    behind: str
    """Text between reasoning and content."""
    separable: bool = True
    """Whether the closing tag is a marker of its own; otherwise it is part of the content's header."""

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends inside a reasoning block."""
        return prompt.rstrip().endswith(self.opening)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends with a closed reasoning block: thinking is off."""
        return prompt.rstrip().endswith(self.closing)

    def all_of(self, text: str) -> bool:
        """Whether the text consists of tags only."""
        return not text.replace(self.closing, "").replace(self.opening, "").strip()

    def without_empty_block(self, text: str) -> str:
        """Remove an empty block, or the end of one, from the beginning."""
        if not self.separable:
            return text
        pattern = rf"\s*({re.escape(self.opening)}\s*)?{re.escape(self.closing)}\s*"
        return re.sub(rf"\A{pattern}", "", text)


class AnswerWriter:
    """Finds the generated text of messages, for one template with its variables and tools."""

    def __init__(
        self,
        render: Render,
        tags: Callable[[], ReasoningTags | None],
        *,
        stops: Sequence[str],
        specials: Sequence[str],
        eos: str,
    ) -> None:
        """`tags` is called only if needed; `eos` ends answers after which the template writes nothing."""
        self._render, self._find_tags = render, tags
        self._stops, self._specials, self._eos = stops, specials, eos

    def write(
        self, before: Sequence[Message], message: Message, *, next_role: str | None, finished: bool
    ) -> GeneratedAnswer:
        """The generated text of `message` after the messages `before`; `next_role` is the role of the next turn.

        An unfinished answer ends where the record's text ends.
        """
        prompt = self._render(before, True)
        reasoning, content, calls = reasoning_of(message), text_of(message), message.get("tool_calls")
        if reasoning and ((tags := self.tags) is None or tags.closed_by(prompt)):
            reasoning = ""  # the template has no place for it, or the prompt turns thinking off
        marked = self._marked(message, reasoning=_REASONING if reasoning else "", content=_CONTENT if content else "")
        written = self._render([*before, marked], False)
        unwritten = bool(reasoning) and _REASONING not in written
        if unwritten:
            marked = self._marked(message, content=_CONTENT if content else "")
            written = self._render([*before, marked], False)
        if content and _CONTENT not in written:
            if not calls:
                raise ValueError("it leaves out what the assistant says")
            content = ""  # some templates have no place for it beside calls
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
            return GeneratedAnswer(prompt=prompt, text=said, stop="")
        if reasoning and not (content or calls) and self.tags is not None and self.tags.closing in rest:
            end = rest.index(self.tags.closing) + len(self.tags.closing)
            said, rest = said + rest[:end], rest[end:]
        elif not (reasoning or content or calls):  # the target stops at once
            place, stop = _first(self._stops, rest)
            rest = rest[place:] if stop else rest
        return self._ended(
            before, marked, GeneratedAnswer(prompt=prompt, text=said, stop=""), rest, next_role, finished
        )

    @property
    def tags(self) -> ReasoningTags | None:
        """How the template marks reasoning; None if it cannot."""
        return self._find_tags()

    def _marked(self, message: Message, *, content: str, reasoning: str = "") -> dict[str, Any]:
        marked = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
        # Empty content stays as it is: some templates distinguish null from "".
        marked |= {"content": content} if content else {}
        return _with_reasoning(marked, reasoning)

    def _unwritten_reasoning(
        self, before: Sequence[Message], prompt: str, written: str, reasoning: str, content: str
    ) -> tuple[str, str]:
        """Text with reasoning that the template leaves out here, and the rest of the rendering."""
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
        """The part of `lead`, the rendering before the message, that is generated: without the prompt."""
        if lead.startswith(prompt):
            return lead[len(prompt) :]
        if prompt.startswith(lead):
            return ""
        common = _common_opening(prompt, lead)
        # Prompt and rendering differ in reasoning tags only: the rest of the rendering is generated.
        if self.tags is not None and self.tags.all_of(prompt[len(common) :]):
            return lead[len(common) :]
        # An earlier turn is rendered differently: look for the generation prompt itself.
        opening = prompt.removeprefix(self._render(before, False))
        place = lead.rfind(opening) if opening.strip() and opening != prompt else -1
        return lead[place + len(opening) :] if place >= 0 else ""

    def _behind_opening(self, before: Sequence[Message], prompt: str, written: str) -> str:
        """The part of a rendering without content after the opening of the turn."""
        if written.startswith(prompt):
            return written[len(prompt) :]
        common = len(_common_opening(prompt, written))
        if self.tags is not None and self.tags.all_of(prompt[common:]):
            return written[common:]
        probe = self._attempt([*before, {"role": "assistant", "content": _CONTENT}])
        lead = probe.partition(_CONTENT)[0] if probe and _CONTENT in probe else ""
        if len(lead) > common and written.startswith(lead):
            return written[len(lead) :]
        # An earlier turn is rendered differently: the turn begins after the marker that ends the prompt.
        markers = [marker[0] for marker in _MARKER.finditer(prompt) if marker.end() == len(prompt.rstrip())]
        place = written.rfind(markers[0]) + len(markers[0]) if markers and markers[0] in written else 0
        return written[max(place, common) :]

    def _without_empty_block(self, text: str) -> str:
        """Remove the reasoning block that the template writes where the record has none."""
        return text if not text or self.tags is None else self.tags.without_empty_block(text)

    def _without_opening(self, prompt: str, lead: str, text: str) -> str:
        """Remove an opening that the prompt already has."""
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
        answer: GeneratedAnswer,
        rest: str,
        next_role: str | None,
        finished: bool,
    ) -> GeneratedAnswer:
        """The answer with the text that the template writes after it, up to the stop token."""
        # A stop token before a tool call of the record did not end the answer.
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
        return GeneratedAnswer(prompt=answer.prompt, text=text, stop=stop if finished else "")

    def _last_of_specials(self, rest: str) -> tuple[int, str]:
        """The last special token of a text of special tokens only: an end that is not among the stop tokens."""
        left = rest
        for token in self._specials:
            left = left.replace(token, "")
        if left.strip():
            return -1, ""
        places = [(rest.rfind(token), token) for token in self._specials if token in rest]
        return max(places, default=(-1, ""))

    def _look_ahead(self, before: Sequence[Message], marked: Message, next_role: str | None) -> tuple[str, str]:
        """The stop token that some templates write with the next turn, and the whitespace before it."""
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
    """Find the reasoning tags of a template by rendering reasoning in several ways, else in its source."""
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
            return found  # the blocks themselves were not printed
    named = _CLOSING_TAG.search(source)
    if named is None:
        return None
    closing, opening = named[0], named[0].replace("/", "", 1)
    # Such templates have a newline inside both tags, or none.
    blank = "\n" if re.search(re.escape(opening) + r"(\n|\\n)", source) else ""
    return ReasoningTags(
        opening=opening, closing=closing, before=opening + blank, behind=f"{blank}{closing}{blank}{blank}"
    )


def _tags_of(prompt: str, written: str | None, bare: str | None) -> ReasoningTags | None:
    """The tags in a rendering with reasoning, given the prompt and the rendering without reasoning."""
    if written is None or bare is None or _REASONING not in written:
        return None
    lead, _, rest = written.partition(_REASONING)
    behind = rest.partition(_CONTENT)[0]
    if _CONTENT not in rest or _CALL in behind:  # the call comes first: the common end of both renderings is no tag
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
    """The reasoning of a message, in a field of its own."""
    return next((value for name in REASONING_FIELDS if isinstance(value := message.get(name), str) and value), "")


def _with_reasoning(message: Mapping[str, Any], reasoning: str) -> dict[str, Any]:
    """Add reasoning under all names; rendering adds those that the server passes."""
    return {**message, "reasoning_content": reasoning, "thought": reasoning} if reasoning else dict(message)


def call_names(message: Message) -> list[str]:
    """Names of the functions that a message calls."""
    return [call["function"]["name"] for call in message.get("tool_calls") or ()]


def text_of(message: Message) -> str:
    """The content of a message as text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return content or ""


def _common_opening(one: str, other: str) -> str:
    """The common beginning of both texts, without an incomplete marker."""
    common = one[: _common(one, other)]
    if common in (one, other):
        return common
    return _UNFINISHED_MARKER.sub("", common)


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _first(tokens: Sequence[str], text: str, start: int = 0) -> tuple[int, str]:
    """Position and text of the first of these tokens, the longest where several begin."""
    places = [(place, -len(token), token) for token in tokens if (place := text.find(token, start)) >= 0]
    return (min(places)[0], min(places)[2]) if places else (-1, "")


def _behind(left: str, right: str) -> str:
    """`right` without leading whitespace that `left` already ends with."""
    blanks = right[: len(right) - len(right.lstrip())]
    for size in range(len(blanks), 0, -1):
        if left.endswith(blanks[:size]):
            return right[size:]
    return right


def _join(left: str, right: str) -> str:
    """Concatenate; whitespace on both sides of the seam counts once."""
    return left + _behind(left, right)
