"""The fewest tokens of a text are never more than it has; where that is not sure, there is no bound."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import CHATML, chat_tokenizer, letter_tokenizer
from each import each
from eyas.serve.builders.least_tokens import UNICODE_FORMS, least_tokens

TEXTS = [
    "the falcon and the eagle ",
    "    ",
    "\n\n",
    "0123456789",
    "日本語のテキスト",
    "e\u0301",
    "가",
    "🦅🦅",
    "<|end|>",
    "====",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level(normalizer: Any = None, *, alphabet: bool = True, added: Any = ()) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator([text * 3 for text in TEXTS], trainer)
    backend.add_tokens([AddedToken("<|end|>", special=True, normalized=False), *added])
    return wrapped(backend)


def sentence_pieces(*, fallback: bool = True) -> PreTrainedTokenizerFast:
    vocab = {piece: number for number, piece in enumerate([*BYTES, "▁", "a", "b", "ab", "▁ab", "▁ab▁", "é"])}
    merges = [("a", "b"), ("▁", "ab"), ("▁ab", "▁")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=fallback, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrapped(backend)


SURE = {
    "byte level": byte_level(),
    "bytes without tokens": byte_level(alphabet=False),
    "added in other letters": byte_level(added=[AddedToken("<｜終｜>" * 6)]),
    "composed": byte_level(normalizers.NFC()),
    "decomposed": byte_level(normalizers.NFD()),
    "sentence pieces": sentence_pieces(),
    "one token per byte": chat_tokenizer(CHATML),
    "letters": letter_tokenizer(),
}


@each("name", SURE)
def test_no_text_has_fewer_tokens(name: str) -> None:
    tokenizer, chance = SURE[name], random.Random(0)
    bound = least_tokens(tokenizer)
    assert bound is not None
    unusual = [chr(code) for code in (0, 6, 0x1FEF, 0x2126, 0x1F82, 0x390, 0xAC01, 0x10FFFF, 0x2F800, 0x4FFFF)]
    for _ in range(400):
        pieces = chance.choices(
            [*TEXTS, *unusual, "<｜終｜>" * 6, "a", "b", " ", "\u0301", "ab ", "~^`@"], k=chance.randrange(1, 12)
        )
        text = "".join(piece * chance.choice([1, 1, 2, 40]) for piece in pieces)
        assert bound.of(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text
    for piece in (*TEXTS, *unusual):
        text = unicodedata.normalize("NFD", piece) * 100
        assert bound.of(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text
    assert bound.of("a" * 10**6) > 10**6 // 100, "and it says something"


def test_unicode_forms_shorten_no_text_by_more() -> None:
    forms = {form: [unicodedata.normalize(form, chr(code)) for code in range(0x30000)] for form in ("NFC", "NFD")}
    for size in (len, lambda text: len(text.encode("utf-8", "surrogatepass"))):
        decomposing = max(size(chr(code)) / size(text) for code, text in enumerate(forms["NFD"]))
        composing = max(
            size(text) / size(chr(code)) for code, text in enumerate(forms["NFD"]) if forms["NFC"][code] == chr(code)
        )
        assert decomposing <= UNICODE_FORMS["NFD"]
        assert decomposing * composing <= UNICODE_FORMS["NFC"]


def test_there_is_no_bound_if_text_may_be_dropped() -> None:
    stripping, words, removing = (
        Tokenizer(models.BPE()),
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.BPE()),
    )
    stripping.normalizer = normalizers.Strip()
    removing.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    blank = Tokenizer(models.BPE())
    blank.pre_tokenizer = pre_tokenizers.Whitespace()
    for tokenizer in (
        *map(wrapped, (stripping, words, removing, blank)),
        sentence_pieces(fallback=False),
        byte_level(added=[AddedToken("<mask>", lstrip=True)]),
        byte_level(normalizers.Replace(" ", "")),
        byte_level(normalizers.Lowercase()),
    ):
        assert least_tokens(tokenizer) is None
