"""The commands of docs/gemma.md, with a target whose layers see a few tokens only: from a file to a server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.llm import LLM
from eyas.sampling_params import SamplingParams
from eyas.target.model import Target
from tiny_gguf import tiny_model, write_gguf

pytestmark = pytest.mark.slow

Run = Callable[..., Any]
WINDOW, NEW_TOKENS = 8, 12
PROMPTS = [f"{word} the 12 {word}\n" * times for word in ("th", "é", "zebra", "1") for times in (1, 30)]
RECIPES = Path(__file__).parents[2] / "recipes"
TARGET = "gemma-3-270m-q4_k_m.gguf"
TEMPLATE = "recipes/gemma3-270m/question-answer.jinja"
SMALL = {
    "train.steps": 3,
    "train.depths": 2,
    "data.workers": 1,
    "data.held_out_share": 0.3,
    "data.max_length": 1024,
    "data.pack_length": 1024,
    "data.join_share": 0.0,
    "data.join_length": 0,
    "drafter.draft_vocab_size": 200,
    "target.device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 in a GGUF file, where all layers but one see 8 tokens."""
    folder = tmp_path_factory.mktemp("windows")
    model = tiny_model(
        "gemma3_text",
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        num_hidden_layers=7,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        tie_word_embeddings=False,  # a random tied model says its own last token for ever
    )
    write_gguf(model, folder / TARGET)
    (folder / "recipes").symlink_to(RECIPES)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (folder / "text.txt").write_text("the th 12 " * 200)
    return folder


def test_a_target_with_windows_goes_from_a_file_to_a_server(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    loading = ["--chat-template", TEMPLATE, "--cache", "cache", "--dtype", "float32", "--device", "cpu"]
    common = ["--target", TARGET, "--stop", "Question:", *loading]
    answers = folder / "answers.jsonl"
    outcome = run("data", "answer", "prompts.jsonl", "--out", answers, "--max-tokens", NEW_TOKENS, *common)
    assert outcome.code == 0, outcome
    target = Target.load(str(folder / TARGET), dtype="float32", cache=folder / "cache")
    records = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    samples = [sample for record in records for sample in record["samples"]]
    assert sum(len(sample["prompt_token_ids"]) > 10 * WINDOW for sample in samples) >= 3
    for sample in samples:
        assert sample["token_ids"] == plainly(target, sample["prompt_token_ids"])

    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    outcome = run("train", "recipes/gemma3-270m/drafter.toml", "--cache", "cache", *settings)
    assert outcome.code == 0, outcome
    drafter = "runs/gemma/drafter"

    llm = LLM(
        TARGET,
        drafter=drafter,
        depth=3,
        dtype="float32",
        device="cpu",
        cache=Path("cache"),
        max_model_len=1024,
    )
    outputs = llm.generate([sample["prompt_token_ids"] for sample in samples], SamplingParams(max_tokens=NEW_TOKENS))
    assert [list(output.tokens) for output in outputs] == [sample["token_ids"] for sample in samples]
    assert llm.stats.drafts > 0

    words = ["--drafter", drafter, "--max-tokens", 8, *common]
    lengths = ["--prefix", "text.txt", "--prefix-tokens", 0, "--prefix-tokens", 400]
    outcome = run("eval", "prompts.jsonl", *words, *lengths, "--depth", 2, "--json")
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["whole"]

    few = ["--case-prompts", 1, "--context-prompts", 1]
    outcome = run("doctor", "prompts.jsonl", *words, "--depth", 3, "--length", 300, "--limit", 2, *few)
    assert outcome.code == 0, outcome
    speculation = json.dumps({"model": drafter, "method": "eagle3", "num_speculative_tokens": 3})
    outcome = run("serve", TARGET, *loading, "--speculative-config", speculation, "--check", "--port", 0)
    assert outcome.code == 0, outcome


@torch.no_grad()
def plainly(target: Target, prompt_ids: list[int]) -> list[int]:
    """What transformers' own decoding says."""
    ids = target.model.generate(  # type: ignore[operator]
        torch.tensor([prompt_ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=list(target.stop_ids())
    )
    answer: list[int] = ids[0, len(prompt_ids) :].tolist()
    return answer
