"""From a conversation to token ids and a loss mask.

The mask marks what the target itself would have generated: every assistant turn, its end-of-turn token included, and
nothing the template puts around it. An answer that a length ended has no end-of-turn token of its own: there the one
that the template writes is left out.

Two ways find those turns. Where the template marks them (`{% generation %}`), the tokenizer says; otherwise the
conversation is rendered up to and behind each turn, and the difference is the turn. A template that rewrites earlier
turns when later ones come (some drop old thinking) fits neither: the text a server sees then differs from turn to
turn, and such a conversation is refused rather than masked wrongly.

Invariant: a masked token was generated as a token of its own; one that a boundary cuts through is never masked.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.data.conversations import Conversation, Message
from eyas.errors import UserError
from eyas.target.chat_template import require_template


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A conversation as the target reads it."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """Whether the target would have generated this token."""

    @property
    def trainable(self) -> int:
        """Tokens that count."""
        return sum(self.mask)


class ChatEncoder:
    """Encodes conversations with a tokenizer's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> None:
        require_template(tokenizer, tokenizer.name_or_path)
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} cannot say which text a token stands for; "
                "loss masks need a fast tokenizer (tokenizer.json)"
            )
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._marked = "{% generation" in str(tokenizer.chat_template).replace("{%-", "{%")

    def encode(self, conversation: Conversation) -> Encoded:
        """Ids and mask of one conversation."""
        messages, where = list(conversation.messages), conversation.where
        if self._marked:
            return self._encode_marked(messages, where, conversation.finished)
        text = self._render(messages, where)
        spans = [
            self._span(messages, index, text, where)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        encoding: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        turns = [[i for i, (a, b) in enumerate(offsets) if start <= a and b <= end and a < b] for start, end in spans]
        return self._masked(ids, turns, conversation.finished)

    def _encode_marked(self, messages: list[Message], where: str, finished: bool) -> Encoded:
        try:
            output: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], return_dict=True, return_assistant_tokens_mask=True
            )
        except (TemplateError, ValueError) as error:
            raise UserError(f"{where}: the chat template refuses this conversation ({error}); change it") from error
        ids, marks = output["input_ids"], output["assistant_masks"]
        runs = [list(run) for marked, run in groupby(range(len(ids)), key=lambda i: bool(marks[i])) if marked]
        if not runs and any(message["role"] == "assistant" for message in messages):
            raise UserError(
                f"{where}: the chat template has {{% generation %}} markers but marks nothing here; mend the template"
            )
        # Markers often end at the text; the token that closes the turn is generated too.
        turns = [run + [i for i in (run[-1] + 1,) if i < len(ids) and ids[i] in self._stop_ids] for run in runs]
        return self._masked(ids, turns, finished)

    def _span(self, messages: Sequence[Message], index: int, text: str, where: str) -> tuple[int, int]:
        """Where in the text the assistant's turn `index` stands, with what the template closes it with."""
        before = self._render(messages[:index], where, opening=True)
        behind = text if index + 1 == len(messages) else self._render(messages[: index + 1], where)
        if not behind.startswith(before):
            raise UserError(
                f"{where}: the chat template renders turn {index + 1} otherwise than it opens one, so the turn cannot "
                "be told from its surroundings; add {% generation %} markers to the template"
            )
        if not text.startswith(behind):
            raise UserError(
                f"{where}: the chat template rewrites turn {index + 1} or what stands before it once later turns come, "
                "so one text cannot show what the target saw; split the conversation into one record per answer"
            )
        return len(before), len(behind)

    def _masked(self, ids: Sequence[int], turns: Sequence[list[int]], finished: bool) -> Encoded:
        """Mask each turn up to its last stop token: what the template puts behind that, nobody generates."""
        mask = [False] * len(ids)
        for turn in turns:
            stops = [place for place, i in enumerate(turn) if ids[i] in self._stop_ids]
            end = stops[-1] + 1 if stops else len(turn)
            if stops and not finished and turn is turns[-1]:
                while end and ids[turn[end - 1]] in self._stop_ids:
                    end -= 1
            for i in turn[:end]:
                mask[i] = True
        return Encoded(ids=tuple(ids), mask=tuple(mask))

    def _render(self, messages: Sequence[Message], where: str, *, opening: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=opening
                )
            )
        except (TemplateError, ValueError) as error:
            raise UserError(f"{where}: the chat template refuses this conversation ({error}); change it") from error
