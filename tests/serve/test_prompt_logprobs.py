"""A prompt that comes back, and logprobs of its tokens, as OpenAI and vLLM write them and lm-eval reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from each import each

PROMPT = "abcabcxyz"


def own_logprobs(target: Any, text: str) -> list[float]:
    """By the model of transformers."""
    ids = target.tokenizer.encode(text)
    with torch.no_grad():
        rows = target.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(dim=-1)
    return [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]


@each("max_tokens", [0, 1, 8])
def test_an_echo_has_the_prompt_and_its_logprobs(client: Any, target: Any, max_tokens: int) -> None:
    fields = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    client.complete(**fields | {"max_tokens": 1})  # so that the prefix cache has it
    answer = client.complete(**fields | {"max_tokens": max(1, max_tokens)}).json["choices"][0]["text"]
    reply = client.complete(**fields, echo=True, logprobs=2).json
    (choice,), usage = reply["choices"], reply["usage"]
    assert choice["text"] == PROMPT + (answer if max_tokens else "")
    assert choice["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), max_tokens)
    told = choice["logprobs"]
    assert {len(values) for values in told.values()} == {len(PROMPT) + max_tokens}
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == list(range(len(choice["text"])))
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(PROMPT)] == pytest.approx(own_logprobs(target, PROMPT), abs=1e-4)
    for token, logprob, top in zip(
        told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True
    ):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
    client.all_back()


def test_the_request_of_lm_eval_works(client: Any, target: Any) -> None:
    """Several prompts as token ids, one token asked for: sums over a part of the prompt, and whether it was greedy."""
    texts = ["abcabc", "xyzxy", "a"]
    prompts = [target.tokenizer.encode(text) for text in texts]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    for text, choice in zip(texts, client.complete(**body).json["choices"], strict=True):
        told = choice["logprobs"]
        assert sum(told["token_logprobs"][1:-1]) == pytest.approx(sum(own_logprobs(target, text)), abs=1e-4)
        assert choice["text"].startswith(text)
        greedy = [
            logprob == max(top.values())
            for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True)
        ]
        assert greedy[-1], "the token that was generated"


def test_an_echo_is_streamed_first(client: Any) -> None:
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "n": 2, "temperature": 1, "seed": 7, "max_tokens": 12}
    whole = client.complete(**fields).json["choices"]
    events = [event["choices"][0] for event in client.complete(**fields, stream=True).events]
    for index, choice in enumerate(whole):
        parts = [event for event in events if event["index"] == index]
        assert parts[0]["text"] == PROMPT
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "text_offset"):
            assert [value for part in parts for value in part["logprobs"][name]] == choice["logprobs"][name]
        joined = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
        assert joined[0] is None
        assert joined[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-4)
    plain = client.complete(prompt=PROMPT, echo=True).json["choices"][0]
    assert plain["text"].startswith(PROMPT)
    assert plain["logprobs"] is None


@each("path", ["chat", "complete"])
def test_prompt_logprobs_in_vllms_format(client: Any, target: Any, path: str) -> None:
    reply = getattr(client, path)(prompt_logprobs=2, return_token_ids=True).json
    holder = reply if path == "chat" else reply["choices"][0]
    ids, told = holder["prompt_token_ids"], holder["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == len(ids)
    for token, entry in zip(ids[1:], told[1:], strict=True):
        assert 2 <= len(entry) <= 3
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert {one["rank"] for one in entry.values()} >= {1, 2}
        assert entry[str(token)]["decoded_token"] == target.tokenizer.decode([token])
    if path == "complete":
        logprobs = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], told[1:], strict=True)]
        assert logprobs == pytest.approx(own_logprobs(target, "abcabc"), abs=1e-4)
    getattr(client, path)(prompt_logprobs=0, stream=True).assert_refused(400, "prompt_logprobs", "stream false")
    assert "prompt_logprobs" not in getattr(client, path)().text


def test_an_echo_keeps_special_tokens_and_cuts(client: Any) -> None:
    marked = "<|im_start|>a b<|im_end|>"
    assert client.complete(prompt=marked, echo=True, max_tokens=0).json["choices"][0]["text"] == marked
    cut = client.complete(prompt="abcdef", echo=True, max_tokens=0, truncate_prompt_tokens=2, logprobs=0)
    (choice,) = cut.json["choices"]
    assert choice["text"] == "ef"
    assert choice["logprobs"]["tokens"] == ["e", "f"]
