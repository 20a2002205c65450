"""A check describes what training makes of a corpus."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from chat_tokenizer import CHATML, chat_tokenizer
from eyas.train.corpus.check import check_corpus
from eyas.train.corpus.encoding import EncodingSettings, encode_corpus
from eyas.train.corpus.vocabulary import choose_vocabulary
from eyas.train.plots import plot_check


def conversation(question: str, answer: str, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


def corpus(folder: Path) -> tuple[Path, EncodingSettings]:
    chosen = chat_tokenizer(CHATML)
    chosen.save_pretrained(folder / "target")
    (folder / "target" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    rows = [conversation(f"Say {i}", f"{i} " * i, target="me") for i in range(1, 31)]
    rows += [conversation("Say 3", "3 3 3", target="you"), conversation("Say 4", "4 4 4 4 ", target="me")]
    rows += [conversation("Long", "x" * 500), {"prompt": "Say nothing"}, {"nothing": 1}]
    file = folder / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file, EncodingSettings(source=str(folder / "target"), max_length=200)


def check(folder: Path, **options: Any) -> dict[str, Any]:
    file, settings = corpus(folder)
    record = check_corpus([file], settings, **{"max_bad_share": 0.05, **options})
    return json.loads(json.dumps(record))  # type: ignore[no-any-return]


def test_a_check_counts_what_training_counts(tmp_path: Path) -> None:
    record = check(tmp_path)
    encoded, counts = encode_corpus(*(lambda file, settings: ([file], settings))(*corpus(tmp_path)))
    assert (record["rows"], record["tokens"]) == (len(encoded), encoded.tokens)
    assert record["trained_on"] == encoded.trainable
    assert record["lengths"]["tokens"]["1"] == encoded.longest
    assert {name: record[name] for name in ("kept", "cut", "too_long", "unanswered")} == {
        "kept": 32,
        "cut": 0,
        "too_long": 1,
        "unanswered": 1,
    }
    assert record["bad"]["by_reason"] == dict(counts.bad.by_reason) == {"none of the known formats": 1}
    assert record["bad"]["read"] == 35
    assert record["refused"] is None
    for share, size in record["vocabulary"]["tokens_for"].items():
        assert choose_vocabulary(encoded, size, 1000)[1] >= float(share) - 1e-9
        assert size == 1 or choose_vocabulary(encoded, size - 1, 1000)[1] < float(share)
    assert record["vocabulary"]["distinct"] == len(np.unique(encoded.ids[encoded.mask]))
    assert record["vocabulary"]["coverage_of"]["1000"] == 1


def test_duplicates_authors_and_evaluation_prompts_are_counted(tmp_path: Path) -> None:
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("Say 7", "Say 8!", "Sing")))
    record = check(tmp_path, evaluation=[prompts])
    assert record["duplicates"] == {"conversations": 2, "first_prompts": 2}
    assert record["authors"] == {"me": 31, "": 2, "you": 1}
    (own,) = record["overlap"]["files"]
    assert {name: own[name] for name in ("prompts", "exact", "near", "shared")} == {
        "prompts": 3,
        "exact": 2,
        "near": 0,
        "shared": 0,
    }
    assert own["examples"][0]["conversation"] == f"{tmp_path}/a.jsonl:7"
    assert record["overlap"]["conversations"]["exact"] == 2


def test_a_check_reports_refusals_and_is_plotted(tmp_path: Path) -> None:
    record = check(tmp_path, max_bad_share=0.0)
    assert "1 of 35 records are bad" in record["refused"]
    plot_check(record, tmp_path / "check.png")
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")


def test_a_corpus_without_answers_can_be_checked(tmp_path: Path) -> None:
    file, settings = corpus(tmp_path)
    file.write_text('{"prompt": "Say nothing"}\n')
    record = check_corpus([file], settings, max_bad_share=0.05)
    assert "1 unanswered" in record["refused"]
    assert (record["rows"], record["tokens"]) == (0, 0)
    plot_check(record, tmp_path / "check.png")
