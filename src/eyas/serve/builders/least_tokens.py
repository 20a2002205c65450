"""A lower bound of the number of tokens of a text, without tokenizing it.

A token stands for no more text than it has letters, so a text longer than the longest token times the context cannot
fit, and is refused before it is tokenized. The bound must never refuse a text that would fit. It is therefore only used
for tokenizers all of whose parts are known not to drop or shorten text.
"""

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

UNICODE_FORMS = {"NFC": 9, "NFD": 3}
"""The factor by which they can shorten a text, in letters or in bytes; a test computes it. ASCII does not change."""
_NOT_SHORTER = {"Prepend", "ByteLevel"}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}
"""Pre-tokenizers that cut text and drop nothing, unless their behavior is Removed."""


@dataclass(frozen=True, kw_only=True)
class LeastTokens:
    """The bound for one tokenizer."""

    longest: int
    """The most text of one token, in bytes if `of_bytes`, else in letters."""
    of_bytes: bool
    shrinks: int = 1
    """The factor by which normalizers may shorten a text beyond ASCII."""
    dropped: bytes = b""
    """Bytes without a token, which are dropped."""

    def of(self, text: str) -> int:
        """The fewest tokens of a text."""
        size = len(text.encode("utf-8", "surrogatepass").translate(None, self.dropped)) if self.of_bytes else len(text)
        return -(-size // (self.longest * (1 if text.isascii() else self.shrinks)))


def least_tokens(tokenizer: PreTrainedTokenizerBase) -> LeastTokens | None:
    """The bound for a tokenizer; None if none is certain."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    described: dict[str, Any] = json.loads(backend.to_str())
    model, added = described["model"], described["added_tokens"]
    normalizers, cutters = _parts(described["normalizer"]), _parts(described["pre_tokenizer"])
    if model["type"] != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # others fuse unknown words into one token; such added tokens include the blanks beside them
    if any(part["type"] not in _PRE_TOKENIZERS or part.get("behavior") == "Removed" for part in cutters):
        return None
    # A letter of the byte-level alphabet is a byte; added tokens are written out.
    longest = max([1, *map(len, model["vocab"]), *(len(token["content"].encode()) for token in added)])
    shrinks = 1
    for part in normalizers:
        if part["type"] == "Replace":
            pattern, content = part["pattern"].get("String"), part["content"]
            if not pattern or not content:
                return None
            longest *= -(-len(pattern.encode()) // len(content))  # in bytes, of which a letter may have several
        elif part["type"] in UNICODE_FORMS:
            shrinks *= UNICODE_FORMS[part["type"]]
        elif part["type"] not in _NOT_SHORTER:
            return None
    if any(part["type"] == "ByteLevel" for part in (*normalizers, *cutters)):
        alphabet = _byte_alphabet()
        missing = [sign for sign in alphabet if sign not in model["vocab"]]
        return LeastTokens(
            longest=longest, of_bytes=True, shrinks=shrinks, dropped=bytes(alphabet[sign] for sign in missing)
        )
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        return LeastTokens(longest=longest, of_bytes=False, shrinks=shrinks)
    return None  # letters without a token may be dropped


def _parts(described: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if described is None:
        return []
    inner = described.get("normalizers") or described.get("pretokenizers")
    return [described] if inner is None else [part for one in inner for part in _parts(one)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes map to themselves, the others to 256 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
