"""The same conversation as other servers would put it to the target.

Invariant: a rendering that the tokenizer or template at hand cannot make, or that would be the target's own rendering
over again, is None with a reason; it is told as left out, never silently replaced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from eyas.data.conversations import Conversation
from eyas.data.encode_prompt import encode_prompt
from eyas.doctor.templates import FOREIGN_TEMPLATES
from eyas.doctor.texts import FOREIGN_SYSTEM, LONG_SYSTEM
from eyas.errors import UserError
from eyas.target.chat_template import TEMPLATE_ERRORS
from eyas.target.model import Target
from eyas.train.corpus.augment import find_opening

Render = Callable[[Conversation], tuple[int, ...] | None]


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """A way to put a conversation to the target."""

    name: str
    about: str
    render: Render


def prompt_formats(target: Target) -> list[PromptFormat]:
    """Every way of this file, whether it can be made or not."""
    made = _Renderer(target)
    found = [
        PromptFormat(name="no BOS", about="the first token is missing", render=made.without_bos),
        PromptFormat(name="no template", about="the question as bare text", render=made.bare),
        PromptFormat(
            name="no system prompt", about="no system turn, not even the template's own", render=made.no_system
        ),
        PromptFormat(
            name="long system prompt", about="15 rules, some 450 tokens", render=made.with_system(LONG_SYSTEM)
        ),
        PromptFormat(
            name="foreign system prompt",
            about="a system prompt unlike any in training data",
            render=made.with_system(FOREIGN_SYSTEM),
        ),
    ]
    found += [
        PromptFormat(name=f"{family} template", about="another family's template", render=made.with_template(text))
        for family, text in FOREIGN_TEMPLATES.items()
    ]
    return found


class _Renderer:
    def __init__(self, target: Target) -> None:
        self._target, self._tokenizer = target, target.tokenizer
        self._opening = find_opening(target.tokenizer)

    def without_bos(self, conversation: Conversation) -> tuple[int, ...] | None:
        ids = self._own(conversation)
        bos = self._tokenizer.bos_token_id
        # Some tokenizers call the token that opens every turn their BOS: then the first turn loses its opening.
        return ids[1:] if bos is not None and ids and ids[0] == bos else None

    def bare(self, conversation: Conversation) -> tuple[int, ...] | None:
        text = "\n".join(str(message["content"]) for message in _spoken(conversation).messages)
        # What is put to the target as bare text anyway (--raw) cannot lose a template.
        return None if _same_ending(self._encode(text), self._own(conversation)) else self._encode(text + "\n")

    def no_system(self, conversation: Conversation) -> tuple[int, ...] | None:
        opening, ids = self._opening, self._try(_spoken(conversation))
        if opening.system_ids is None or ids is None:
            return None
        start, end = len(opening.bos_ids), len(opening.bos_ids) + len(opening.system_ids)
        if ids[start:end] != opening.system_ids:
            return None
        changed = ids[:start] + ids[end:]
        return None if changed == self._own(conversation) else changed

    def with_system(self, prompt: str) -> Render:
        def render(conversation: Conversation) -> tuple[int, ...] | None:
            if not self._opening.takes_system:
                return None
            told = ({"role": "system", "content": prompt}, *_spoken(conversation).messages)
            return self._try(replace(conversation, messages=told))

        return render

    def with_template(self, template: str) -> Render:
        def render(conversation: Conversation) -> tuple[int, ...] | None:
            own = self._own(conversation)
            try:
                text = self._tokenizer.apply_chat_template(
                    [dict(message) for message in conversation.messages],
                    chat_template=template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except TEMPLATE_ERRORS:
                return None
            ids = self._encode(str(text))
            # The target's own markers around the same turns: nothing foreign about it.
            return None if ids in (own, self._try(_spoken(conversation))) or _same_ending(ids, own) else ids

        return render

    def _own(self, conversation: Conversation) -> tuple[int, ...]:
        """As the target has it: it was asked this way before."""
        return tuple(encode_prompt(self._target, conversation))

    def _try(self, conversation: Conversation) -> tuple[int, ...] | None:
        """The same of other messages, which the template may refuse."""
        try:
            return self._own(conversation)
        except UserError:
            return None

    def _encode(self, text: str) -> tuple[int, ...]:
        encoding: Any = self._tokenizer(text, add_special_tokens=False)
        return tuple(cast(list[int], encoding["input_ids"]))


def _same_ending(ids: Sequence[int], own: Sequence[int]) -> bool:
    """Whether the target's own rendering ends like this one: they differ in a system turn at most."""
    return len(ids) <= len(own) and tuple(own[-len(ids) :]) == tuple(ids)


def _spoken(conversation: Conversation) -> Conversation:
    """The conversation without the system turns it begins with."""
    messages = conversation.messages
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return replace(conversation, messages=messages[first:])
