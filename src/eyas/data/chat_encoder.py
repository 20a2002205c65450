"""From a conversation to token ids and a loss mask.

The mask marks what the target itself generates: its answers with the stop token that ends them, and nothing the
template puts around them. An answer that a length ended has no stop token.

A record may keep the tokens that its author read and said; those are used as they are. From text the same is made for
every answer: the prompt is the template's rendering of the messages before it, as a server would feed it, and the
answer is what the target would have had to generate there. Answers of one conversation share a row as long as each
prompt begins with all of the row before it. Where a template rewrites earlier turns (many drop old thinking), the
target saw another text, and the answer gets a row of its own.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.data.answer_text import AnswerWriter, ReasoningTags, call_names, find_tags
from eyas.data.conversations import Conversation, Message, Sample
from eyas.data.tool_messages import message_forms
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
    """A row: a text as the target reads it."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """Whether the target would have generated this token."""

    @property
    def trainable(self) -> int:
        """Tokens that count."""
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
    """Samples of one conversation as rows: one whose prompt begins with the whole row before it extends that row."""
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
    """Encodes conversations with a tokenizer's own chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`variables` are the template's arguments, such as enable_thinking; a record's own go over them."""
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
        """Answers left out so far: the template does not write what they call."""

    def encode(self, conversation: Conversation) -> tuple[Encoded, ...]:
        """The rows of one conversation; none if nobody answers in it."""
        return merge(self.samples(conversation))

    def samples(self, conversation: Conversation) -> tuple[Sample, ...]:
        """Its answers as tokens, each with its prompt."""
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
        """The answers that the template writes, and whether those are all.

        One with calls that the template leaves out is none: nobody knows what the target said there.
        """
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
        """The template's text, as `Target.encode_chat` has it."""
        options = ChatTemplateOptions(variables=variables, add_generation_prompt=opening)
        return render_chat(self._tokenizer, messages, tools or None, options)

    def _spoken_ids(self, text: str, stop: str) -> tuple[int, ...]:
        """The tokens of an answer, which begin anew behind the prompt."""
        ids = self._ids(self._guard + text)[len(self._ids(self._guard)) :]
        if not stop:
            return ids
        return (*ids, self._stops[stop]) if stop in self._stops else ids + self._ids(stop)

    def _prompt_ids(self, text: str, known: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The tokens of a prompt; turns that earlier prompts of the conversation had are not tokenised again."""
        if not self._seams:
            return self._ids(text)
        ends = [seam.end() for seam in re.finditer("|".join(map(re.escape, self._seams)), text)]
        pieces = [text[start:end] for start, end in pairwise([0, *ends, len(text)])]
        for piece in pieces:
            if piece not in known:
                known[piece] = self._ids(piece)
        return tuple(chain.from_iterable(known[piece] for piece in pieces))

    def _ids(self, text: str) -> tuple[int, ...]:
        # The template has written the special tokens.
        encoding: Any = self._tokenizer(text, add_special_tokens=False)
        return tuple(encoding["input_ids"])


def _needed_guard(tokenizer: PreTrainedTokenizerBase) -> str:
    """A special token before which a text has to be tokenised, because the tokenizer begins one with a space; or none.

    An answer stands behind a prompt: the space would be one that nobody wrote.
    """
    guard, probe = str(tokenizer.eos_token or ""), "a b"
    if not guard:
        return ""
    alone: list[int] = tokenizer.encode(probe, add_special_tokens=False)
    guarded: list[int] = tokenizer.encode(guard + probe, add_special_tokens=False)
    alike = guarded[1:] == alone or guarded[:1] != tokenizer.encode(guard, add_special_tokens=False)
    return "" if alike else guard


def _parts_texts(tokenizer: PreTrainedTokenizerBase, token: str, token_id: int) -> bool:
    """Whether what stands behind this token is tokenised as if nothing stood before it."""

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    added = tokenizer.added_tokens_decoder.get(token_id)
    if added is None or not added.special or added.normalized or added.lstrip or added.rstrip:
        return False
    return all(
        ids(f"a b{token}{text}") == ids(f"a b{token}") + ids(text) for text in ("c", " c d", "\nc", "\n\n c", "é")
    )
