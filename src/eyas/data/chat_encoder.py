"""Encodes conversations as token ids with a loss mask.

The mask marks the tokens that the target generates: answers with their stop token, nothing else of the template. An
answer that a length limit ended has no stop token.

Token ids of a record are used as they are. Otherwise the prompt of an answer is the template's rendering of the
messages before it, as a server would feed it, and the answer is the text that the target would have generated there.
Answers of a conversation share a row as long as each prompt begins with the whole row so far. If the template rewrites
earlier turns (many drop old reasoning), the answer gets a row of its own.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.data.answer_text import REASONING_FIELDS, AnswerWriter, ReasoningTags, call_names, find_tags
from eyas.data.conversations import Conversation, Message, Sample
from eyas.errors import UserError
from eyas.target.chat_template import (
    TEMPLATE_ERRORS,
    ChatTemplateOptions,
    check_variables,
    render_chat,
    require_template,
)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A training row: token ids and loss mask."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """True for tokens that the target generates."""

    @property
    def trainable(self) -> int:
        return sum(self.mask)

    def shortened(self, length: int) -> "Encoded | None":
        """The row up to the last answer that ends within `length` tokens; None if there is none."""
        if len(self.ids) <= length:
            return self
        for end in range(length, 0, -1):
            if self.mask[end - 1] and not self.mask[end]:
                return Encoded(ids=self.ids[:end], mask=self.mask[:end])
        return None


def merge(samples: Iterable[Sample]) -> tuple[Encoded, ...]:
    """Rows of a conversation: a sample extends the last row if its prompt begins with that row."""
    rows: list[tuple[list[int], list[bool]]] = []
    for sample in samples:
        ids, mask = rows[-1] if rows else ([], [])
        if not rows or list(sample.prompt_ids[: len(ids)]) != ids:
            ids, mask = [], []
            rows.append((ids, mask))
        told = sample.prompt_ids[len(ids) :]
        ids += [*told, *sample.answer_ids]
        mask += [False] * len(told) + [True] * len(sample.answer_ids)
    return tuple(Encoded(ids=tuple(ids), mask=tuple(mask)) for ids, mask in rows)


class ChatEncoder:
    """Encodes conversations with the tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`variables` are template arguments, such as enable_thinking; those of a record override them."""
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._stops = {text: i for i in sorted(stop_ids, reverse=True) if (text := str(tokenizer.decode([i])))}
        self._specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._eos = str(tokenizer.eos_token) if tokenizer.eos_token_id in stop_ids else ""
        self._guard = _needed_guard(tokenizer)
        self._seams = (
            [] if self._guard else [stop for stop, i in self._stops.items() if _parts_texts(tokenizer, stop, i)]
        )
        self._tags: dict[str, ReasoningTags | None] = {}
        self.unwritten = 0
        """Number of answers left out because the template does not render their tool calls."""

    def encode(self, conversation: Conversation) -> tuple[Encoded, ...]:
        """The rows of a conversation; none if it has no answer."""
        return merge(self.samples(conversation))

    def samples(self, conversation: Conversation) -> tuple[Sample, ...]:
        """The answers of a conversation as token ids, each with its prompt."""
        if conversation.samples:
            return conversation.samples
        if not conversation.answered:
            return ()
        require_template(self._tokenizer, self._tokenizer.name_or_path, tools=bool(conversation.tools))
        check_variables(self._tokenizer, conversation.chat_template_kwargs, conversation.where)
        variables = {**self._variables, **conversation.chat_template_kwargs}
        refusals: list[Exception | str] = []
        best: tuple[Sample, ...] = ()
        for messages in message_forms(conversation.messages):
            try:
                samples, complete = self._samples_of(messages, conversation, variables)
            except TEMPLATE_ERRORS as error:
                refusals.append(error)
                continue
            if complete:
                return samples
            best = best or samples
            refusals.append("it leaves out tool calls")
        if best:
            self.unwritten += sum(message["role"] == "assistant" for message in conversation.messages) - len(best)
            return best
        reason = " ".join(str(refusals[0]).split())[:200] or type(refusals[0]).__name__
        raise UserError(
            f"{conversation.where}: the chat template refuses this conversation ({reason}); change it or the "
            "template's arguments"
        )

    def _samples_of(
        self, messages: Sequence[Message], conversation: Conversation, variables: Mapping[str, Any]
    ) -> tuple[tuple[Sample, ...], bool]:
        """The answers whose tool calls the template renders, and whether these are all."""
        writer = AnswerWriter(
            lambda said, opening: self._render(said, variables, conversation.tools, opening=opening),
            lambda: self._reasoning_tags(variables),
            stops=list(self._stops),
            specials=self._specials,
            eos=self._eos,
        )
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        samples = []
        known: dict[str, tuple[int, ...]] = {}
        for i in answers:
            next_role = messages[i + 1]["role"] if i + 1 < len(messages) else None
            finished = conversation.finished or i != answers[-1]
            answer = writer.write(messages[:i], messages[i], next_role=next_role, finished=finished)
            if all(name in answer.text for name in call_names(messages[i])):
                ids = self._spoken_ids(answer.text, answer.stop)
                samples.append(Sample(prompt_ids=self._prompt_ids(answer.prompt, known), answer_ids=ids))
        return tuple(samples), len(samples) == len(answers)

    def _reasoning_tags(self, variables: Mapping[str, Any]) -> ReasoningTags | None:
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._tags:
            source = str(self._tokenizer.get_chat_template())
            self._tags[key] = find_tags(
                lambda said, opening: self._render(said, variables, (), opening=opening), source
            )
        return self._tags[key]

    def _render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        *,
        opening: bool,
    ) -> str:
        """Render as `Target.encode_chat` does."""
        options = ChatTemplateOptions(variables=variables, add_generation_prompt=opening)
        return render_chat(self._tokenizer, messages, tools or None, options)

    def _spoken_ids(self, text: str, stop: str) -> tuple[int, ...]:
        """Token ids of an answer, tokenised apart from its prompt."""
        ids = self._ids(self._guard + text)[len(self._ids(self._guard)) :]
        if not stop:
            return ids
        return (*ids, self._stops[stop]) if stop in self._stops else ids + self._ids(stop)

    def _prompt_ids(self, text: str, known: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Token ids of a prompt; pieces in `known` are not tokenised again."""
        if not self._seams:
            return self._ids(text)
        ends = [seam.end() for seam in re.finditer("|".join(map(re.escape, self._seams)), text)]
        pieces = [text[start:end] for start, end in pairwise([0, *ends, len(text)])]
        for piece in pieces:
            if piece not in known:
                known[piece] = self._ids(piece)
        return tuple(chain.from_iterable(known[piece] for piece in pieces))

    def _ids(self, text: str) -> tuple[int, ...]:
        encoding: Any = self._tokenizer(text, add_special_tokens=False)
        return tuple(encoding["input_ids"])


def message_forms(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """Variants of a conversation's messages for templates that refuse or drop tool calls; the server uses the first.

    Most templates want arguments as an object, some as JSON text; some want null content beside calls, some ids of nine
    letters, and some no reasoning beside content and calls.
    """
    plain = _with_calls(messages)
    yield plain
    if not any(message.get("tool_calls") for message in plain):
        return
    as_text = [_arguments_as_text(message) for message in plain]
    yield as_text
    for form in (plain, as_text):
        yield [{**m, "content": None} if m.get("tool_calls") and not m.get("content") else m for m in form]
    for form in (plain, as_text):
        yield _short_ids(form)
    yield [
        {name: value for name, value in message.items() if name not in REASONING_FIELDS}
        if message.get("tool_calls") and message.get("content")
        else message
        for message in plain
    ]


def _with_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Give tool calls and results ids and names, and arguments as objects."""
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    unanswered: list[str] = []
    for message in messages:
        turn = dict(message)
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_call(call, len(names) + n) for n, call in enumerate(turn["tool_calls"])]
            names |= {call["id"]: call["function"]["name"] for call in turn["tool_calls"]}
            unanswered = [call["id"] for call in turn["tool_calls"]]
        if turn["role"] == "tool":
            key = turn.setdefault("tool_call_id", unanswered[0] if unanswered else f"call{len(names):05d}")
            unanswered = [other for other in unanswered if other != key]
            if key in names:
                turn.setdefault("name", names[key])
        made.append(turn)
    return made


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") or {key: value for key, value in call.items() if key in ("name", "arguments")}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {**function, "arguments": {} if arguments is None else arguments}
    return {"id": f"call{number:05d}", "type": "function", **call, "function": function}


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace ids of tool calls by ids of nine letters and digits."""
    short: dict[str, str] = {}
    made = []
    for message in messages:
        turn = dict(message)
        if turn.get("tool_calls"):
            for call in turn["tool_calls"]:
                short.setdefault(call["id"], f"call{len(short):05d}")
            turn["tool_calls"] = [{**call, "id": short[call["id"]]} for call in turn["tool_calls"]]
        if "tool_call_id" in turn:
            turn["tool_call_id"] = short.setdefault(turn["tool_call_id"], f"call{len(short):05d}")
        made.append(turn)
    return made


def _needed_guard(tokenizer: PreTrainedTokenizerBase) -> str:
    """A special token to precede answers in tokenisation, if the tokenizer puts a space before texts; else empty."""
    guard, probe = str(tokenizer.eos_token or ""), "a b"
    if not guard:
        return ""
    alone: list[int] = tokenizer.encode(probe, add_special_tokens=False)
    guarded: list[int] = tokenizer.encode(guard + probe, add_special_tokens=False)
    alike = guarded[1:] == alone or guarded[:1] != tokenizer.encode(guard, add_special_tokens=False)
    return "" if alike else guard


def _parts_texts(tokenizer: PreTrainedTokenizerBase, token: str, token_id: int) -> bool:
    """Whether text after this token is tokenised independently of text before it."""

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    added = tokenizer.added_tokens_decoder.get(token_id)
    if added is None or not added.special or added.normalized or added.lstrip or added.rstrip:
        return False
    return all(
        ids(f"a b{token}{text}") == ids(f"a b{token}") + ids(text) for text in ("c", " c d", "\nc", "\n\n c", "é")
    )
