"""A corpus does not depend on the number of processes; bad records are skipped, counted and limited."""

import json
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_tokenizer import CHATML, chat_tokenizer
from eyas.data.chat_encoder import ChatEncoder
from eyas.data.conversations import Conversation
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat
from eyas.train.corpus import encoding as encoding_module
from eyas.train.corpus.corpus import Corpus
from eyas.train.corpus.encoding import (
    EncodingProgress,
    EncodingSettings,
    FitCounts,
    encode_conversations,
    encode_corpus,
    fingerprint_tokenizer,
)
from eyas.train.recipe import Augmentation

STOPS = ("</s>", "<|im_end|>")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_module, "CHUNK", 16)


def record(i: int) -> dict[str, Any]:
    """Conversation whose answer repeats its number."""
    answer = {"role": "assistant", "content": f"{i} " * (1 + i % 7)}
    return {"messages": [{"role": "user", "content": f"Say {i}"}, answer]}


def conversations(count: int) -> list[Conversation]:
    return [Conversation(messages=tuple(record(i)["messages"]), where=f"f:{i}") for i in range(count)]


def encode(given: Iterable[Conversation], max_length: int = 200) -> tuple[Corpus, FitCounts]:
    chosen = chat_tokenizer(CHATML)
    return encode_conversations(given, chosen, chosen.convert_tokens_to_ids(list(STOPS)), max_length=max_length)


def target(folder: Path, template: str = CHATML) -> str:
    """Folder with the tokenizer of a target."""
    chosen = chat_tokenizer(template)
    chosen.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": chosen.convert_tokens_to_ids(list(STOPS))})
    )
    return str(folder)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_a_corpus_has_the_rows_of_the_encoder_in_order() -> None:
    given = conversations(20)
    corpus, counts = encode(given)
    chosen = chat_tokenizer(CHATML)
    encoder = ChatEncoder(chosen, chosen.convert_tokens_to_ids(list(STOPS)))
    expected = [row for conversation in given for row in encoder.encode(conversation)]
    assert counts == FitCounts(kept=20)
    assert [tuple(corpus.take([i]).ids.tolist()) for i in range(len(corpus))] == [e.ids for e in expected]
    assert [tuple(corpus.take([i]).mask.tolist()) for i in range(len(corpus))] == [e.mask for e in expected]
    assert corpus.tokens == sum(len(e.ids) for e in expected)
    assert corpus.trainable == sum(e.trainable for e in expected)
    assert corpus.longest == max(len(e.ids) for e in expected)


@pytest.mark.slow
def test_the_corpus_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    rows = [*(record(i) for i in range(40)), {"prompt": "?"}, "{\n", {"messages": [{"role": "x", "content": "y"}]}]
    file, source = write(tmp_path / "a.jsonl", *rows), target(tmp_path / "target")
    settings = EncodingSettings(
        source=source, max_length=200, augmentation=Augmentation(no_template=0.3), chat_format=ChatFormat()
    )
    found: dict[int, list[object]] = {1: [], 2: []}
    (one, one_counts), (two, two_counts) = (
        encode_corpus([file], settings, workers=workers, inspect=attrgetter("where"), on_found=found[workers].append)
        for workers in (1, 2)
    )
    assert one_counts == two_counts
    assert (one_counts.kept, one_counts.unanswered, len(one_counts.bad)) == (40, 1, 2)
    assert one_counts.augmented["no_template"] > 5
    for name in ("ids", "mask", "offsets", "conversation"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert found[1] == found[2] == [f"{file}:{line}" for line in range(1, 42)]
    alone, _ = encode(conversations(40))
    plain, _ = encode_corpus([file], EncodingSettings(source=source, max_length=200), workers=1)
    assert np.array_equal(alone.ids, plain.ids)


def test_a_conversation_that_the_template_refuses_is_a_bad_record(tmp_path: Path) -> None:
    picky = "{% if '7' in messages[0]['content'] %}{{ raise_exception('no such order') }}{% endif %}" + CHATML
    file, source = write(tmp_path / "a.jsonl", *(record(i) for i in range(40))), target(tmp_path / "target", picky)
    settings = EncodingSettings(source=source, max_length=200)
    _, counts = encode_corpus([file], settings, max_bad_share=0.1)
    assert (counts.kept, counts.bad.read) == (36, 40)
    assert counts.bad.by_reason == {"refused by the chat template": 4}
    assert counts.bad.examples["refused by the chat template"][0].startswith(f"{file}:8: ")
    with pytest.raises(UserError, match=r"4 of 40 records are bad, above .* data\.max_bad_share .*a\.jsonl:8"):
        encode_corpus([file], settings, max_bad_share=0.05)
    with pytest.raises(UserError, match=r"^f:7: .*no such order"):
        encode_conversations(conversations(40), chat_tokenizer(picky), [], max_length=200)


def test_progress_starts_at_zero_and_reaches_the_end(tmp_path: Path) -> None:
    file, source = write(tmp_path / "a.jsonl", *(record(i) for i in range(40))), target(tmp_path / "target")
    told: list[EncodingProgress] = []
    encode_corpus([file], EncodingSettings(source=source, max_length=200), on_progress=told.append)
    assert [progress.conversations for progress in told] == [0, 16, 32, 40]
    assert [progress.bytes_total for progress in told] == [file.stat().st_size] * 4
    assert told[0].bytes_read == 0
    assert told[-1].bytes_read == file.stat().st_size
    assert "MB of conversations in 1 process" in str(told[0])
    assert "encoded 40 conversations (100%" in str(told[-1])


def test_little_text_starts_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_module.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    file = tmp_path / "a.jsonl"
    for size, workers in ((100, 1), (20_000_000, 2), (10**9, 16)):
        with file.open("wb") as stream:
            stream.truncate(size)
        assert encoding_module._worthwhile_workers([file]) == workers


def test_nothing_to_train_on_is_refused_with_counts(tmp_path: Path) -> None:
    file, source = write(tmp_path / "a.jsonl", {"prompt": "Hi"}, record(1), record(2)), target(tmp_path / "target")
    settings = EncodingSettings(source=source, max_length=5)
    with pytest.raises(UserError, match=r"of 3 conversations none .* 2 too long .* 5, 1 unanswered, 0 bad"):
        encode_corpus([file], settings)
    corpus, counts = encode_corpus([file], settings, max_bad_share=None)
    assert (len(corpus), counts.too_long) == (0, 2)


def test_no_files_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.files"):
        encode_corpus([], EncodingSettings(source="smollm2", max_length=100))


def test_the_fingerprint_depends_on_tokenizer_template_and_stop_tokens() -> None:
    chosen, other = chat_tokenizer(CHATML), chat_tokenizer(CHATML.replace("\n", " "))
    keys = {fingerprint_tokenizer(chosen, [1]), fingerprint_tokenizer(chosen, [2]), fingerprint_tokenizer(other, [1])}
    assert len(keys) == 3
    assert fingerprint_tokenizer(chat_tokenizer(CHATML), [1]) in keys


def test_files_are_read_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", record(1)), write(tmp_path / "b.jsonl", record(2))]
    corpus, counts = encode_corpus(files, EncodingSettings(source=target(tmp_path / "target"), max_length=100))
    assert (counts.kept, counts.bad.read) == (2, 2)
    both, _ = encode(conversations(3)[1:])
    assert np.array_equal(corpus.ids, both.ids)


def test_answers_whose_calls_a_template_leaves_out_are_counted() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = (
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "There."},
        {"role": "assistant", "content": "There it is."},
    )
    conversation = Conversation(messages=messages, where="x:1")
    words = chat_tokenizer(CHATML)
    stops = [words.convert_tokens_to_ids("<|im_end|>")]
    _, counts = encode_conversations([conversation], words, stops, max_length=512)
    assert (counts.kept, counts.unwritten) == (1, 1)
    assert counts.as_json()["unwritten"] == 1
