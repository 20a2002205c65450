"""The tokenizer inside a GGUF file as a Hugging Face tokenizer.

GGUF stores vocabulary and merges, but of how text is cut before merging only a name (`tokenizer.ggml.pre`).
transformers' own conversion ignores that name and cuts every byte-level BPE like GPT-2, which gives other ids
than the target was trained on (SmolLM2 splits digits). So byte-level BPE is built from a table of those names.
Where llama.cpp departs from what a model was trained with (it leaves out Qwen's composed form, and marks of letters for
tekken and gpt-4o), the model is followed; all else is llama.cpp's, token by token (benchmarks/gguf_tokenizers.py).
Invariant: a name outside the table is refused; a tokenizer that is nearly right is worse than none.
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
# Words by case: capitals, then small letters; marks and letters without case are of both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _REST_WITH_PATHS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How one kind of byte-level BPE cuts text into words before it merges bytes."""

    patterns: tuple[str, ...]
    """Regular expressions, one after the other: each cuts out what it finds in the pieces so far."""
    nfc: bool = False
    """Whether text is brought to Unicode's composed form first."""
    ignore_merges: bool = False
    """Whether a word that is itself in the vocabulary is taken whole."""
    adds_bos: bool = False
    """What llama.cpp does for this kind when the file does not say."""


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
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(source, max_length)
    elif kind == "llama":
        tokenizer = _sentencepiece(source, max_length)
    else:
        raise UserError(
            f"{source.path} has a tokenizer of kind {kind!r}; supported are gpt2 and llama, "
            "use the model's safetensors folder instead"
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


def _sentencepiece(source: GgufFile, max_length: int) -> PreTrainedTokenizerBase:
    """SentencePiece's BPE: of all neighbours it joins those that give the piece of the best score.

    The file keeps scores and no merges. Every way to cut a piece into two others is a merge of the piece's rank.
    """
    tokens = source.required("tokenizer.ggml.tokens", list)
    types = source.required("tokenizer.ggml.token_type", list)
    scores = source.required("tokenizer.ggml.scores", list)
    if not len(tokens) == len(types) == len(scores):
        raise UserError(
            f"{source.path} has {len(tokens)} tokens, {len(types)} types and {len(scores)} scores; download it again"
        )
    count = _used(types)
    tokens, types, scores = tokens[:count], types[:count], scores[:count]
    ranked = sorted((index for index in range(count) if types[index] == _NORMAL), key=lambda index: -scores[index])
    pieces = {tokens[index] for index in ranked}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in (tokens[index] for index in ranked)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    roles = _special_tokens(source, tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token=roles.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = source.optional("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    # Phi-3's special tokens take the white space behind them, which no key says: its template has line ends there.
    swallowing = source.required("general.architecture", str) == "phi3"
    _add_tokens(tokenizer, tokens, types, swallowing=swallowing)
    # As llama.cpp does where the file does not say.
    around = _around(source, roles, adds_bos=True)
    if around != (None, None):
        tokenizer.post_processor = _template(tokenizer, *around)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, model_max_length=max_length, **roles
    )


def _special_tokens(source: GgufFile, tokens: list[str]) -> dict[str, str]:
    """Beginning, end, padding and unknown token, where the file names them."""
    return {
        role: tokens[index]
        for role, key in _ROLES.items()
        if (index := source.optional(key, int, -1)) in range(len(tokens))
    }


def _byte_level_bpe(source: GgufFile, max_length: int) -> PreTrainedTokenizerBase:
    name = source.required("tokenizer.ggml.pre", str)
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"{source.path} has pre-tokenizer {name!r}; supported are {', '.join(PRE_TOKENIZERS)}, "
            "use the model's safetensors folder instead"
        )
    pre = PRE_TOKENIZERS[name]
    tokens = source.required("tokenizer.ggml.tokens", list)
    types = source.required("tokenizer.ggml.token_type", list)
    count = _used(types)
    tokens, types = tokens[:count], types[:count]
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
    roles = _special_tokens(source, tokens)
    byte_level = processors.ByteLevel(trim_offsets=False)
    around = _around(source, roles, adds_bos=pre.adds_bos)
    if around == (None, None):
        tokenizer.post_processor = byte_level
    else:
        tokenizer.post_processor = processors.Sequence([byte_level, _template(tokenizer, *around)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, model_max_length=max_length, **roles
    )


def _pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _used(types: list[int]) -> int:
    """How many rows are tokens: those at the end may only pad the embedding matrix to a round size."""
    count = len(types)
    while count and types[count - 1] == _UNUSED:
        count -= 1
    return count


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int], *, swallowing: bool = False) -> None:
    """Mark the tokens that are found in text before anything is merged; some swallow the white space behind them."""
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


def _around(source: GgufFile, roles: Mapping[str, str], *, adds_bos: bool) -> tuple[str | None, str | None]:
    """The tokens to put before and behind every text."""
    bos = source.optional("tokenizer.ggml.add_bos_token", bool, adds_bos)
    eos = source.optional("tokenizer.ggml.add_eos_token", bool, False)
    return roles.get("bos_token") if bos else None, roles.get("eos_token") if eos else None


def _template(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=[part for part in (bos, "$A", eos) if part is not None],
        pair=[part for part in (bos, "$A", eos, bos, "$B:1", eos) if part is not None],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None],
    )
