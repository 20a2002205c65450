"""Perturbed prompts and targets: other renderings, questions in long texts, quantised weights."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from eyas.data.conversations import Conversation
from eyas.data.encode_prompt import encode_prompt
from eyas.doctor.transcripts import Asked
from eyas.errors import UserError
from eyas.kernels.linear.quantised_linear import Bits, QuantisedLinear, load_quantised, quantise
from eyas.kernels.linear.served_linear import CompiledLinear
from eyas.target.capture import decoder_layers
from eyas.target.chat_template import TEMPLATE_ERRORS
from eyas.target.model import Target
from eyas.target.quantise import quantised_on_gpu
from eyas.target.quantised_checkpoint import multiplies
from eyas.train.corpus.augment import find_opening

TEXTS: Mapping[str, Any] = tomllib.loads(files("eyas.doctor").joinpath("texts.toml").read_text(encoding="utf-8"))
PLACES = ("end", "start", "middle")
Render = Callable[[Conversation], tuple[int, ...] | None]
Linear = nn.Linear | CompiledLinear


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """A rendering of conversations."""

    name: str
    about: str
    render: Render
    """Returns None where the tokenizer or template cannot make it, or where it equals the target's own rendering."""


def prompt_formats(target: Target) -> list[PromptFormat]:
    """List all renderings that other servers may use, possible or not."""
    made = _Renderer(target)
    formats = [
        ("no BOS", "the first token is missing", made.without_bos),
        ("no template", "the question as bare text", made.bare),
        ("no system prompt", "no system turn, not even the template's own", made.no_system),
        ("long system prompt", "15 rules, some 450 tokens", made.with_system(TEXTS["long_system"])),
        (
            "foreign system prompt",
            "a system prompt unlike any in training data",
            made.with_system(TEXTS["foreign_system"]),
        ),
    ]
    formats += [
        (f"{family} template", "another family's template", made.with_template(template))
        for family, template in TEXTS["templates"].items()
    ]
    return [PromptFormat(name=name, about=about, render=render) for name, about, render in formats]


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
        text = "\n".join(str(message["content"]) for message in _without_system(conversation).messages)
        # Prompts that are bare text already (--raw) have no template to lose.
        return None if _same_ending(self._encode(text), self._own(conversation)) else self._encode(text + "\n")

    def no_system(self, conversation: Conversation) -> tuple[int, ...] | None:
        opening, ids = self._opening, self._try(_without_system(conversation))
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
            messages = ({"role": "system", "content": prompt}, *_without_system(conversation).messages)
            return self._try(replace(conversation, messages=messages))

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
            # The target's own markers around the same turns are not foreign.
            same = ids in (own, self._try(_without_system(conversation))) or _same_ending(ids, own)
            return None if same else ids

        return render

    def _own(self, conversation: Conversation) -> tuple[int, ...]:
        return tuple(encode_prompt(self._target, conversation))

    def _try(self, conversation: Conversation) -> tuple[int, ...] | None:
        """Render messages that the template may refuse."""
        try:
            return self._own(conversation)
        except UserError:
            return None

    def _encode(self, text: str) -> tuple[int, ...]:
        encoding: Any = self._tokenizer(text, add_special_tokens=False)
        return tuple(encoding["input_ids"])


def _same_ending(ids: Sequence[int], own: Sequence[int]) -> bool:
    """Whether the target's own rendering ends with these tokens: they differ in a system turn at most."""
    return len(ids) <= len(own) and tuple(own[-len(ids) :]) == tuple(ids)


def _without_system(conversation: Conversation) -> Conversation:
    messages = conversation.messages
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return replace(conversation, messages=messages[first:])


class Filler:
    """Text around a question, by the token: of the user's choice, or the other prompts, repeated where too short.

    It is cut so that a shorter text begins a longer one: the prefix cache then has what was read for 1,000 tokens when
    2,000 are read, and on a CPU that is most of the work.
    """

    def __init__(self, target: Target, text: str) -> None:
        encoding: Any = target.tokenizer(text, add_special_tokens=False, verbose=False)
        self._ids: list[int] = encoding["input_ids"]
        self._target = target

    def take(self, start: int, tokens: int) -> str:
        """Take about this many tokens from `start` on; the text repeats."""
        ids = [self._ids[i % len(self._ids)] for i in range(start, start + tokens)]
        # A cut may split a character.
        return str(self._target.tokenizer.decode(ids)).strip("\ufffd")


def long_prompts(
    target: Target, filler: Filler, questions: Mapping[int, Conversation], length: int, place: str
) -> list[Asked]:
    """Put the last message of each conversation at a place of a text of this length."""
    before, behind = {"end": (length, 0), "start": (0, length), "middle": (length // 2, length - length // 2)}[place]
    asked = []
    for key, question in questions.items():
        parts = [filler.take(0, before)] if before else []
        parts += [str(question.messages[-1]["content"])]
        parts += [filler.take(before, behind)] if behind else []
        message = {"role": "user", "content": "\n\n".join(parts)}
        asked.append(Asked(key=key, ids=tuple(encode_prompt(target, replace(question, messages=(message,))))))
    return asked


def quantisation_name(target: Target, bits: Bits) -> str:
    """Value of `--quantization` for this many bits on the target's device."""
    return "fp8" if bits == 8 and target.device.type == "cuda" else f"int{bits}"


@contextmanager
def quantised(target: Target, bits: Bits) -> Iterator[int]:
    """Quantise every linear layer of the decoder as `--quantization` would, and yield their number.

    The kernels are those of serving, so activations are rounded too. Embeddings, norms and head stay as they are. There
    is no calibration: methods that have one (AWQ, GPTQ) do less harm. Engines hold the layers that they were made with,
    so new ones are needed inside the block and after it.
    Invariant: when the block ends, however it ends, the target has its own layers again.
    """
    found = [
        (parent, name, child)
        for parent in decoder_layers(target.model).modules()
        for name, child in parent.named_children()
        if isinstance(child, Linear) and child.weight.is_floating_point()
    ]
    if not found:
        raise UserError(
            f"{target.facts.source} has no plain linear layers to quantise (it may be quantised already); "
            "leave the quantised cases out"
        )
    make = _quantiser(target, bits)
    try:
        with torch.no_grad():
            for parent, name, child in found:
                setattr(parent, name, make(child))
        yield len(found)
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


def _quantiser(target: Target, bits: Bits) -> Callable[[Linear], nn.Module]:
    """Choose the quantised layer for the target's device; refused where it has no kernel."""
    kind = quantisation_name(target, bits)
    if target.device.type == "cpu":
        kernel, words = load_quantised()
        if kernel is None:
            raise UserError(f"{kind} needs a C compiler ({words}); install one, or leave the quantised cases out")
        return lambda linear: QuantisedLinear.of(kernel, quantise(linear.weight, bits), linear.bias)
    reason = multiplies(target.device, kind, target.dtype)
    if reason is not None:
        raise UserError(f"{kind} cannot be tried on {target.device}: {reason}; leave the quantised cases out")
    return lambda linear: quantised_on_gpu(linear, kind, target.dtype)
