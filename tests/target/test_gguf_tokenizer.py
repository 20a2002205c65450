"""Tokenizers converted from GGUF encode and decode text like the target's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from transformers import AutoTokenizer, Qwen2Tokenizer

from each import each
from eyas.target.locate import locate
from tiny_gguf import PIECES, TOKENS, tiny_model, write_gguf

TEXT = "the  the 12 é\n\n"


def tokenizer_of(tmp_path: Path, **changes: Any) -> Any:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", **changes)
    return AutoTokenizer.from_pretrained(locate(str(path), cache=tmp_path / "cache"))


@each("pre", ["smollm", "qwen2", "gpt-2", "default", "llama-bpe"])
def test_text_survives_encoding_and_decoding(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT


CUT = "It's 12345 naïve, HelloWORLD a/b\n\n  x"
CUTS = {  # as llama.cpp cuts it (benchmarks/gguf_tokenizers.py)
    "default": "It|'|s| |123|45| naïve|,| HelloWORLD| a|/|b|\n\n | x",
    "gpt-2": "It|'s| 12345| naïve|,| HelloWORLD| a|/|b|\n\n | x",
    "refact": "It|'s| |1|2|3|4|5| naïve|,| HelloWORLD| a|/|b|\n\n | x",
    "qwen2": "It|'s| |1|2|3|4|5| naïve|,| HelloWORLD| a|/b|\n\n| | x",
    "dbrx": "It|'s| |123|45| naïve|,| HelloWORLD| a|/b|\n\n| | x",
    "deepseek-coder": "It|'|s| |1|2|3|4|5| naïve|,| HelloWORLD| a|/|b|\n|\n| | x",
    "tekken": "It|'s| |1|2|3|4|5| naïve|,| Hello|WORLD| a|/b|\n\n| | x",
    "gpt-4o": "It's| |123|45| naïve|,| Hello|WORLD| a|/b|\n\n| | x",
}


@each("pre", CUTS)
def test_words_are_cut_as_llama_cpp_cuts_them(pre: str, tmp_path: Path) -> None:
    cutter = tokenizer_of(tmp_path, pre=pre).backend_tokenizer.pre_tokenizer
    assert "|".join(CUT[first:end] for _, (first, end) in cutter.pre_tokenize_str(CUT)) == CUTS[pre]


def test_special_tokens_of_phi3_take_the_white_space_after_them(tmp_path: Path) -> None:
    for family, expected in (("phi3", ["</s>", "▁", "t"]), ("llama", ["</s>", "▁", "<0x0A>", "▁", "t"])):
        path = write_gguf(tiny_model(family), tmp_path / f"{family}.gguf", sentencepiece=True)
        tokenizer = AutoTokenizer.from_pretrained(locate(str(path), cache=tmp_path / "cache"))
        ids = tokenizer.encode("</s>\n t", add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == expected


def test_smollm_cuts_digits_before_words(tmp_path: Path) -> None:
    digits = tokenizer_of(tmp_path, pre="smollm").tokenize("t  12")
    assert digits == ["t", "ĠĠ", "1", "2"]


def test_gpt2_leaves_a_space_to_the_number(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, pre="gpt-2").tokenize("t  12") == ["t", "Ġ", "Ġ", "1", "2"]


@each(("pre", "composed"), [("qwen2", True), ("gpt-2", False)])
def test_only_qwen2_composes_characters(pre: str, composed: bool, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    assert (tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9") == composed


def test_qwen2_is_built_as_transformers_builds_it(tmp_path: Path) -> None:
    ours, theirs = tokenizer_of(tmp_path, pre="qwen2").backend_tokenizer, Qwen2Tokenizer().backend_tokenizer
    text = "It's  the 12345 naïve\n\n  'LL über\t你好 ...\r\n x"
    assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


def test_sentencepiece_files_are_read_too(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentencepiece=True)
    ids = tokenizer.encode("th th", add_special_tokens=False)
    assert ids == [PIECES.index("▁th"), PIECES.index("▁th")]
    assert tokenizer.decode(ids) == "th th"
    assert tokenizer.eos_token == "</s>"


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentencepiece=True, edit=lambda w: w.add_add_bos_token(False))
    assert tokenizer.tokenize("thh t") == ["▁th", "h", "▁", "t"]
    assert tokenizer.tokenize("é") == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("th é th", " th  t ", "😀", "h\n\nt"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@each(
    ("prefix", "bos", "expected"),
    [(None, None, ["<s>", "▁th"]), (True, True, ["<s>", "▁th"]), (False, True, ["<s>", "th"]), (False, False, ["th"])],
)
@each("reload", [1, 2])
def test_sentencepiece_prefixes_follow_the_file(
    prefix: bool | None, bos: bool | None, expected: list[str], reload: int, tmp_path: Path
) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        if prefix is not None:
            writer.add_add_space_prefix(prefix)
        if bos is not None:
            writer.add_add_bos_token(bos)

    tokenizer = tokenizer_of(tmp_path, sentencepiece=True, edit=edit)
    if reload == 2:
        tokenizer.save_pretrained(tmp_path / "again")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "again")
    ids = tokenizer.encode("th")
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids, skip_special_tokens=True) == "th"


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer.encode("the<tool><|end|>")
    assert ids == [TOKENS.index("the"), TOKENS.index("<tool>"), 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<tool>"
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token == "<|start|>"


def test_rows_that_pad_the_embedding_are_no_tokens(tmp_path: Path) -> None:
    assert len(tokenizer_of(tmp_path)) == len(TOKENS) - 1


@each(("pre", "said", "added"), [("smollm", None, False), ("smollm", True, True)])
@each("reload", [1, 2])
def test_the_start_token_is_added_when_the_file_says_so(
    pre: str, said: bool | None, added: bool, reload: int, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, pre=pre, edit=lambda w: None if said is None else w.add_add_bos_token(said))
    if reload == 2:
        tokenizer.save_pretrained(tmp_path / "again")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert (tokenizer.encode("the")[0] == 1) == added
    assert tokenizer.encode("the")[-1] == TOKENS.index("the")


@each(("said", "added"), [(None, True), (False, False)])
def test_llama3_files_add_the_start_token_unless_they_say_no(said: bool | None, added: bool, tmp_path: Path) -> None:
    edit = (lambda w: None) if said is None else (lambda w: w.add_add_bos_token(said))
    assert (tokenizer_of(tmp_path, pre="llama-bpe", edit=edit).encode("the")[0] == 1) == added
