"""What is trained on is what the target read and said, token by token, whatever its template does to earlier turns."""

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from chat_targets import FAMILIES, LETTERS, save_target
from each import each
from eyas.data.chat_encoder import ChatEncoder
from eyas.data.conversations import Conversation
from eyas.data.files import read_conversations
from eyas.target.chat_template import ChatTemplateOptions
from eyas.target.model import Target

Run = Callable[..., Any]


def expected_rows(conversation: Conversation) -> list[tuple[list[int], list[bool]]]:
    """Prompt ids and generated ids, a turn behind the other where the later prompt begins with all of the earlier."""
    rows: list[tuple[list[int], list[bool]]] = []
    for sample in conversation.samples:
        prompt, answer = list(sample.prompt_ids), list(sample.answer_ids)
        known = rows[-1] if rows and prompt[: len(rows[-1][0])] == rows[-1][0] else None
        if known is not None:
            rows.pop()
        ids, mask = known or ([], [])
        new = len(prompt) - len(ids)
        rows.append((prompt + answer, mask + [False] * new + [True] * len(answer)))
    return rows


@each("name", FAMILIES)
def test_trained_ids_are_served_ids_for_all_records_cut_answers_included(name: str, tmp_path: Path, run: Run) -> None:
    folder, prompts, out = save_target(FAMILIES[name], tmp_path / "t"), tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    kwargs: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    questions = [["say " + word, "and more", "go on"] for word in string.ascii_lowercase]
    records = [{"turns": asked, "chat_template_kwargs": kwargs[i % 3]} for i, asked in enumerate(questions)]
    prompts.write_text("\n".join(map(json.dumps, records)))
    limits = ["--max-tokens", 24, "--max-thinking-tokens", 30, "--max-length", 300]
    outcome = run("data", "answer", prompts, "--out", out, "--target", folder, "--json", "--device", "cpu", *limits)
    assert outcome.code == 0, outcome
    assert "temperature 0.9, top_p 0.98 (temperature, top_p of the generation config)" in outcome.err
    counts = json.loads(outcome.out)

    target = Target.load(str(folder), device="cpu")
    encoder, stops = ChatEncoder(target.tokenizer, target.stop_ids()), target.stop_ids()
    conversations = list(read_conversations(out))
    assert len(conversations) == counts["written"] > 15
    merged = 0
    for conversation in conversations:
        rows = encoder.encode(conversation)
        assert [(list(row.ids), list(row.mask)) for row in rows] == expected_rows(conversation)
        merged += len(rows) < len(conversation.samples)
        # The messages are what a client would send back: every prompt is the template's of those before it.
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        assert len(answers) == len(conversation.samples)
        for i, sample in zip(answers, conversation.samples, strict=True):
            options = ChatTemplateOptions(variables=conversation.chat_template_kwargs)
            assert list(sample.prompt_ids) == target.encode_chat(conversation.messages[:i], None, options)
            ended = i != answers[-1] or conversation.finished
            assert (sample.answer_ids[-1] in stops) == ended
            assert not any(token in stops for token in sample.answer_ids[:-1])
            assert len(sample.answer_ids) <= 24 + 30
    assert any(len(conversation.samples) == 3 for conversation in conversations)
    assert sum(not conversation.finished for conversation in conversations) == (
        counts["cut_thinking"] + counts["cut_answer"]
    )
    assert counts["cut_answer"] > 0
    said = {token for c in conversations for sample in c.samples for token in sample.answer_ids}
    assert said >= {target.tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[name].special}
    if name == "qwen3":
        assert counts["cut_thinking"] > 0
        assert 0 < counts["thinking_tokens"] < counts["tokens"]
    # A template that keeps answers as they were said lets a turn go on where the last one ended; one that drops
    # thinking does so where there was none.
    several = sum(len(conversation.samples) > 1 for conversation in conversations)
    assert {"mistral": merged == several, "gpt-oss": merged == 0, "qwen3": 0 < merged < several}[name]


def test_budgets_end_thinking_and_answer_apart_and_change_no_token(tmp_path: Path, run: Run) -> None:
    folder, prompts = save_target(FAMILIES["qwen3"], tmp_path / "t"), tmp_path / "p.jsonl"
    kwargs: list[dict[str, Any]] = [{"enable_thinking": True}, {"enable_thinking": False}]
    records = [{"prompt": letter, "chat_template_kwargs": kwargs[i % 2]} for i, letter in enumerate(LETTERS[2:])]
    prompts.write_text("\n".join(map(json.dumps, records)))

    def answers(name: str, *limits: object) -> tuple[dict[int, dict[str, Any]], Any]:
        out = tmp_path / name
        outcome = run("data", "answer", prompts, "--out", out, "--target", folder, "--json", *limits)
        assert outcome.code == 0, outcome
        return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}, outcome

    whole, _ = answers("whole", "--max-tokens", 200, "--max-thinking-tokens", 200)
    short, outcome = answers("short", "--max-tokens", 6, "--max-thinking-tokens", 9)
    counts = json.loads(outcome.out)
    end = Target.load(str(folder), device="cpu").tokenizer.convert_tokens_to_ids("</think>")
    found = {"thinking": 0, "answer": 0, "ended": 0}
    for number, row in short.items():
        ids, longer = row["samples"][0]["token_ids"], whole[number]["samples"][0]["token_ids"]
        assert ids == longer[: len(ids)]
        thinks = number % 2 == 0
        thought = (longer.index(end) + 1 if end in longer else len(longer)) if thinks else 0
        if thought > 9:
            assert len(ids) == 9
            assert row["messages"][1]["content"] == ""
            found["thinking"] += 1
        elif len(longer) - thought > 6:
            assert len(ids) == thought + 6
            found["answer"] += 1
        else:
            assert ids == longer
            found["ended"] += 1
        assert row["finished"] == (ids == longer)
    assert (counts["cut_thinking"], counts["cut_answer"]) == (found["thinking"], found["answer"])
    assert all(found.values()), found
    _, outcome = answers("shortest", "--max-tokens", 1, "--max-thinking-tokens", 9, "--temperature", 0)
    assert "temperature 0, top_p 0.98 (top_p of the generation config)" in outcome.err
    assert "13 of 26 conversations end in the answer, cut by a length" in outcome.err
    assert "13 of 26 conversations end while the target was thinking, cut by a length" in outcome.err
    assert "raise --max-tokens (now 1), and --max-length (now 512) with it" in outcome.err
    refused = run("data", "answer", prompts, "--out", tmp_path / "short", "--target", folder, "--max-tokens", 7)
    assert "was begun with max_thinking_tokens 9 and this run has 4096" in refused.err


def test_plain_text_is_continued_up_to_a_stop_string_or_as_another_template_has_it(tmp_path: Path, run: Run) -> None:
    folder, prompts = save_target(FAMILIES["mistral"], tmp_path / "t"), tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"once {letter}"}) for letter in "abcdef"))
    out, command = tmp_path / "out", ["data", "answer", prompts, "--target", folder, "--max-tokens", 200]
    assert run(*command, "--out", out, "--raw", "--stop", "ee", "--stop", "x").code == 0
    target = Target.load(str(folder), device="cpu")
    for conversation in read_conversations(out):
        (sample,) = conversation.samples
        assert target.decode(sample.prompt_ids) == conversation.messages[0]["content"]
        text = target.decode(sample.answer_ids, skip_special_tokens=False)
        assert text.endswith(("x", "ee", "</s>"))
        assert conversation.messages[1]["content"] == text.removesuffix("x").removesuffix("ee").removesuffix("</s>")
    assert "was begun with raw True and this run has False" in run(*command, "--out", out, "--stop", "x").err
    template = "{{ 'q' + messages[0].content + (end or '') }}"
    chosen = ["--chat-template", template, "--chat-template-kwargs", '{"end": "z"}']
    assert run(*command, "--out", tmp_path / "other", *chosen).code == 0
    prompted = [c.samples[0].prompt_ids for c in read_conversations(tmp_path / "other")]
    assert {target.decode(ids) for ids in prompted} == {f"qonce {letter}z" for letter in "abcdef"}


def test_training_takes_answers_of_its_own_target_and_refuses_those_of_another(tmp_path: Path, run: Run) -> None:
    folder, prompts, out = save_target(FAMILIES["qwen3"], tmp_path / "t"), tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {letter}"}) for letter in LETTERS[2:]))
    assert run("data", "answer", prompts, "--out", out, "--target", folder, "--max-tokens", 30).code == 0
    moved, other = shutil.copytree(folder, tmp_path / "moved"), shutil.copytree(folder, tmp_path / "other")
    model = LlamaForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.norm.weight[0] += 0.5
    model.save_pretrained(other)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[target]\nsource = "{other}"\n[data]\nfiles = ["{out}"]\nheld_out_share = 0.0\n'
        "max_length = 256\npack_length = 256\n[drafter]\naux_layer_ids = [0, 1, 2]\n"
        f'[train]\nsteps = 1\ndepths = 2\n[output]\nfolder = "{tmp_path}/run"\n'
    )
    refused = run("train", recipe)
    assert refused.code == 2
    assert f"{out}:1: these answers are by {folder}, and the drafter is for {other}, another model" in refused.err
    assert f"eyas data answer --target {other}" in refused.err
    for number, setting in enumerate((f"target.source={moved}", "data.allow_other_authors=true")):
        folder = tmp_path / f"run{number}"
        trained = run("train", recipe, "--set", setting, "--set", f"output.folder={folder}")
        assert trained.code == 0, trained
        record = json.loads((folder / "record.json").read_text())
        samples = [sample for conversation in read_conversations(out) for sample in conversation.samples]
        assert record["data"]["tokens"] == sum(len(s.prompt_ids) + len(s.answer_ids) for s in samples)
        assert record["data"]["trained_on"] == sum(len(s.answer_ids) for s in samples)
