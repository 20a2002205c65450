"""What users would ask, said by the target itself: its chat template up to where a user speaks is the prompt.

A target that was taught conversations has learnt both sides of them, so behind the opening of a user's turn it goes on
with a question of the kind it was taught to answer (Magpie, arXiv 2406.08464). That needs no data at all.

The file grows by prompts in the order in which they end (`resumable_file.py`). Each is drawn by a seed of its own, so a
next run asks for those that are missing, and what was left out before is left out again.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eyas.data.conversations import parse_conversation
from eyas.data.overlap import PromptIndex, normalise
from eyas.data.regenerate import Answerer, ChatPrompt, Reply
from eyas.data.resumable_file import resumable_file, write_line
from eyas.errors import UserError
from eyas.target.chat_template import TEMPLATE_ERRORS, ChatFormat, ChatTemplateOptions, render_chat, require_template

MARK = "eyasmarksauser"
"""Stands for what the user says, to find its place in the template's text."""
VERBATIM = ChatFormat(template="{{ messages[0].content }}")
"""Renders an opening as it is."""


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """What a template writes around a user's first words."""

    opening: str
    end: str
    """What closes them, or opens the answer; may be empty, where only an end of text does."""

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, source: str, chat_format: ChatFormat, system: str | None
    ) -> "UserTurn":
        """Ask the chat template of `source`."""
        require_template(tokenizer, source)
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": MARK})
        try:
            text = render_chat(tokenizer, messages, None, ChatTemplateOptions(variables=chat_format.variables))
        except TEMPLATE_ERRORS as error:
            raise UserError(
                f"the chat template of {source} refuses a conversation that begins so ({str(error)[:200]}); change "
                "--system or what the template is given"
            ) from error
        opening, mark, behind = text.partition(MARK)
        if not mark or not opening:
            raise UserError(
                f"the chat template of {source} writes nothing before a user's words, so nothing asks for them; pass "
                "--chat-template FILE with one that does"
            )
        return cls(opening=opening, end=_first_piece(tokenizer, behind.strip()))


def _first_piece(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The token of a template that a text begins with, or its first line."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if text.startswith(token.content)]
    return max(added, key=len) if added else text.partition("\n")[0]


@dataclass(frozen=True, kw_only=True)
class PromptCounts:
    """How far a run is."""

    asked: int
    """Prompts that the target is asked for."""
    earlier: int
    """Written by earlier runs."""
    written: int = 0
    cut: int = 0
    """Left out: a length ended it."""
    unfit: int = 0
    """Left out: it has no words, half a character, or a special token in it."""
    evaluated: int = 0
    """Left out: it is a prompt that is evaluated on, or shares 13 words in a row with one."""
    duplicate: int = 0
    """Left out: it is there already, case and punctuation apart."""
    failed: int = 0
    """Left for the next run: no server gave an answer."""
    tokens: int = 0
    """Made by this running."""

    @property
    def done(self) -> int:
        """Prompts that are dealt with."""
        return self.earlier + self.written + self.cut + self.unfit + self.evaluated + self.duplicate + self.failed


def ask_for_prompts(
    turn: UserTurn,
    count: int,
    answerer: Answerer,
    out: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    evaluation: PromptIndex,
    arguments: Mapping[str, object],
    on_progress: Callable[[PromptCounts], None],
) -> PromptCounts:
    """Have the target, whose template writes what it is given as it is, say what `out` lacks of `count` prompts.

    Those of `evaluation` are left out. `arguments` are all that decides them beside their number, as JSON values.
    """
    opening = parse_conversation({"prompt": turn.opening}, "the opening of a user's turn")
    with resumable_file(out, arguments, what="prompts") as (stream, ids):
        earlier = [json.loads(line)["prompt"] for line in out.read_bytes().splitlines()]
        seen = set(map(normalise, earlier))
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        fresh = (number for number in range(count) if number not in ids)

        def pull() -> ChatPrompt | None:
            number = next(fresh, None)
            return None if number is None else ChatPrompt(id=number, conversation=opening)

        def outcome(reply: Reply, text: str) -> str:
            if reply.sample is None:
                return "failed"
            if not reply.finished:
                return "cut"
            if not normalise(text) or "\N{REPLACEMENT CHARACTER}" in text or any(token in text for token in special):
                return "unfit"
            if evaluation.find(parse_conversation({"prompt": text}, "a prompt")):
                return "evaluated"
            return "duplicate" if normalise(text) in seen else "written"

        counts = PromptCounts(asked=count, earlier=sum(number < count for number in ids))
        on_progress(counts)
        for reply in answerer(pull):
            text = str(reply.message.get("content") or "").strip()
            name = outcome(reply, text)
            if name == "written":
                seen.add(normalise(text))
                write_line(stream, {"id": reply.id, "prompt": text}, f"prompt {reply.id}")
            tokens = 0 if reply.sample is None else len(reply.sample.answer_ids)
            counts = replace(counts, tokens=counts.tokens + tokens, **{name: getattr(counts, name) + 1})
            on_progress(counts)
        return counts
