"""Small tokenizers with any chat template."""

import string
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.data.chat_encoder import Encoded

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
LETTERS = ["Ġ", "Ċ", *(sign for sign in string.printable[:94] if sign not in "~^`@")]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(
    template: str | None,
    bos: str | None = None,
    *,
    special: Sequence[str] = SPECIAL,
    merges: Sequence[tuple[str, str]] = (),
) -> PreTrainedTokenizerFast:
    """One token per byte, and those of `merges`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token="</s>", bos_token=bos)


def with_bos(tokenizer: PreTrainedTokenizerFast, *, suffix: str = "") -> PreTrainedTokenizerFast:
    """Add a BOS before plain text, and optionally a suffix."""
    named = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {suffix}".strip(), special_tokens=named
    )
    return tokenizer


def letter_tokenizer(
    template: str = CHATML, special: tuple[str, ...] = SPECIAL, letters: Sequence[str] = LETTERS
) -> PreTrainedTokenizerFast:
    """One token per letter, as many as the tiny target knows."""
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*special, *letters])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token="</s>")


def masked_runs(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> list[str]:
    """The masked text, run by run."""
    runs: list[list[int]] = []
    for i, (token, on) in enumerate(zip(encoded.ids, encoded.mask, strict=True)):
        if on and (i == 0 or not encoded.mask[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [str(tokenizer.decode(run)) for run in runs]
