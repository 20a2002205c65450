"""The tokenizer inside a GGUF file as a Hugging Face tokenizer.

GGUF stores vocabulary and merges, but of how text is cut before merging only a name (`tokenizer.ggml.pre`).
transformers' own conversion ignores that name and cuts every byte-level BPE like GPT-2, which gives other ids
than the target was trained on (SmolLM2 splits digits). So byte-level BPE is built from a table of those names.
Invariant: a name outside the table is refused; a tokenizer that is nearly right is worse than none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.errors import UserError
from eyas.target.gguf_file import GgufFile

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPACE = "\u2581"
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


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How one kind of byte-level BPE cuts text into words before it merges bytes."""

    pattern: str | None
    """The regular expression of words; None is GPT-2's, built into `ByteLevel`."""
    individual_digits: bool = False
    nfc: bool = False
    """Whether text is brought to Unicode's composed form first."""
    ignore_merges: bool = False
    """Whether a word that is itself in the vocabulary is taken whole."""
    adds_bos: bool = False
    """What llama.cpp does for this kind when the file does not say."""


_GPT2 = PreTokenizer(pattern=None)
_QWEN2 = PreTokenizer(pattern=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", nfc=True)
_LLAMA3 = PreTokenizer(pattern=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(pattern=None, individual_digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
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
    _add_tokens(tokenizer, tokens, types)
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
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _used(types: list[int]) -> int:
    """How many rows are tokens: those at the end may only pad the embedding matrix to a round size."""
    count = len(types)
    while count and types[count - 1] == _UNUSED:
        count -= 1
    return count


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Mark the tokens that are found in text before anything is merged."""
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
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
