"""Converts the tokenizer of a GGUF file to a Hugging Face tokenizer.

GGUF stores vocabulary and merges, but only a name for how text is cut before merging (`tokenizer.ggml.pre`).
transformers' own conversion ignores that name and cuts every byte-level BPE like GPT-2, which gives other ids than the
target was trained on (SmolLM2 splits digits). Here the names are a table, and a name outside it is refused.
Ids equal llama.cpp's (benchmarks/gguf_tokenizers.py), except where llama.cpp differs from what a model was trained with
(it leaves out Qwen's NFC, and marks of letters for tekken and gpt-4o).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.errors import UserError
from eyas.target.gguf_file import GgufFile

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPACE = "\u2581"
_NEVER_SWALLOWING = ("<unk>", "<s>", "<|endoftext|>")
_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Words by case: capitals, then small letters; marks and letters without case count as both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _REST_WITH_PATHS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How a byte-level BPE cuts text into words before it merges bytes."""

    patterns: tuple[str, ...]
    """Regular expressions, applied in order: each cuts its matches out of the pieces so far."""
    nfc: bool = False
    """Whether text is normalised to NFC first."""
    ignore_merges: bool = False
    """Whether a word that is itself in the vocabulary is taken whole."""
    adds_bos: bool = False
    """llama.cpp's default where the file does not say."""


def _by_case(ending: str, digits: str) -> str:
    return rf"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}|{digits}|{_REST_WITH_PATHS}"


_GPT2 = PreTokenizer(patterns=(_GPT2_WORDS,))
_DIGITS_APART = PreTokenizer(patterns=(r"\p{N}", _GPT2_WORDS))
_QWEN2 = PreTokenizer(patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), nfc=True)
_THREE_DIGITS = PreTokenizer(patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",))
_LLAMA3 = replace(_THREE_DIGITS, ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(patterns=(r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), _DIGITS_APART),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _THREE_DIGITS),
    "deepseek-coder": PreTokenizer(
        patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "tekken": PreTokenizer(patterns=(_by_case("", r"\p{N}"),), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(patterns=(_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),
}


def write_tokenizer(source: GgufFile, folder: Path, *, vocab_size: int, max_length: int) -> None:
    """Write tokenizer files and chat template into `folder`; ids must fit a model of `vocab_size` rows."""
    kind = source.required("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise source.unsupported(f"has a tokenizer of kind {kind!r}; supported are gpt2 and llama,")
    build = _byte_level_bpe if kind == "gpt2" else _sentencepiece
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=build(source), model_max_length=max_length, **_special_tokens(source)
    )
    if len(tokenizer) > vocab_size:
        raise UserError(f"{source.path} has {len(tokenizer)} tokens for {vocab_size} embedding rows; download it again")
    if "tokenizer.chat_template" in source.keys:
        tokenizer.chat_template = source.required("tokenizer.chat_template", str)
    tokenizer.save_pretrained(folder)


def stop_token_ids(source: GgufFile) -> tuple[int, ...]:
    """Return the ids that end an answer: end of text, of turn and of message, as far as the file names them."""
    ids = [source.required(_STOPS[0], int)]
    ids += [source.required(key, int) for key in _STOPS[1:] if key in source.keys]
    return tuple(dict.fromkeys(ids))


def _vocabulary(source: GgufFile) -> tuple[list[str], list[int]]:
    """Tokens and their types, without unused ones at the end that only pad the embedding matrix."""
    tokens = source.required("tokenizer.ggml.tokens", list)
    types = source.required("tokenizer.ggml.token_type", list)
    count = len(types)
    while count and types[count - 1] == _UNUSED:
        count -= 1
    return tokens[:count], types[:count]


def _sentencepiece(source: GgufFile) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours it joins those that give the piece of the best score.

    The file keeps scores and no merges. Every way to cut a piece into two others is a merge of the piece's rank.
    """
    tokens, types = _vocabulary(source)
    scores = source.required("tokenizer.ggml.scores", list)
    sizes = [len(source.required(f"tokenizer.ggml.{key}", list)) for key in ("tokens", "token_type", "scores")]
    if len(set(sizes)) > 1:
        raise UserError(
            f"{source.path} has {sizes[0]} tokens, {sizes[1]} types and {sizes[2]} scores; download it again"
        )
    normal = (index for index, kind in enumerate(types) if kind == _NORMAL)
    ranked = [tokens[index] for index in sorted(normal, key=lambda index: -scores[index])]
    pieces = set(ranked)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token=_special_tokens(source).get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = source.optional("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    # Phi-3's special tokens take the white space after them, which no key says: its template has line ends there.
    swallowing = source.required("general.architecture", str) == "phi3"
    _add_tokens(tokenizer, tokens, types, swallowing=swallowing)
    template = _template(source, tokenizer, adds_bos=True)
    if template is not None:
        tokenizer.post_processor = template
    return tokenizer


def _byte_level_bpe(source: GgufFile) -> Tokenizer:
    name = source.required("tokenizer.ggml.pre", str)
    if name not in PRE_TOKENIZERS:
        raise source.unsupported(f"has pre-tokenizer {name!r}; supported are {', '.join(PRE_TOKENIZERS)},")
    pre = PRE_TOKENIZERS[name]
    tokens, types = _vocabulary(source)
    merges = [tuple(merge.split(" ", 1)) for merge in source.required("tokenizer.ggml.merges", list)]
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre.ignore_merges,
        )
    except Exception as error:  # the Rust library raises bare Exception
        raise UserError(f"the merges of {source.path} do not fit its tokens ({error}); download it again") from error
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types)
    byte_level = processors.ByteLevel(trim_offsets=False)
    template = _template(source, tokenizer, adds_bos=pre.adds_bos)
    tokenizer.post_processor = byte_level if template is None else processors.Sequence([byte_level, template])
    return tokenizer


def _special_tokens(source: GgufFile) -> dict[str, str]:
    """Beginning, end, padding and unknown token, where the file names them."""
    tokens, _ = _vocabulary(source)
    return {
        role: tokens[index]
        for role, key in _ROLES.items()
        if (index := source.optional(key, int, -1)) in range(len(tokens))
    }


def _pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int], *, swallowing: bool = False) -> None:
    """Add the tokens that are found in text before merging; with `swallowing` they take the white space after them."""
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=kind == _CONTROL,
                normalized=False,
                rstrip=swallowing and token not in _NEVER_SWALLOWING,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _template(source: GgufFile, tokenizer: Tokenizer, *, adds_bos: bool) -> processors.TemplateProcessing | None:
    """Puts tokens before and after every text, if there are any."""
    roles = _special_tokens(source)
    bos = roles.get("bos_token") if source.optional("tokenizer.ggml.add_bos_token", bool, adds_bos) else None
    eos = roles.get("eos_token") if source.optional("tokenizer.ggml.add_eos_token", bool, False) else None
    if bos is None and eos is None:
        return None
    return processors.TemplateProcessing(
        single=[part for part in (bos, "$A", eos) if part is not None],
        pair=[part for part in (bos, "$A", eos, bos, "$B:1", eos) if part is not None],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None],
    )
