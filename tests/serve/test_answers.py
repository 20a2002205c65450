"""Answers over HTTP are the engine's own, whole or in chunks, in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from each import each
from eyas.engine.engine import Engine
from eyas.engine.request import Request
from eyas.sampling import Sampling

if TYPE_CHECKING:
    from eyas.target.model import Target

PROMPT = "abcabc"


@pytest.fixture(scope="module")
def alone(target: Target) -> Any:
    """The target's answers without drafter and server."""
    engine = Engine(target)

    def answer(prompt: list[int], tokens: int, **options: Any) -> Any:
        request = Request(
            prompt=tuple(prompt), sampling=Sampling(), max_new_tokens=tokens, stop_ids=target.stop_ids(), **options
        )
        return engine.generate([request])[0]

    return answer


def test_a_greedy_completion_is_the_engines_own(client: Any, alone: Any, target: Target) -> None:
    expected = alone(target.tokenizer.encode(PROMPT), 24)
    for fields in ({}, {"speculative": {"mode": "fixed", "depth": 3}}, {"speculative": {"mode": "off"}}):
        reply = client.complete(prompt=PROMPT, max_tokens=24, **fields).json
        assert reply["choices"][0]["text"] == expected.text
        assert reply["choices"][0]["finish_reason"] == expected.finished.value
        assert reply["usage"]["completion_tokens"] == len(expected.tokens)
        assert reply["usage"]["prompt_tokens"] == len(PROMPT)
    client.all_back()


def test_a_greedy_chat_is_the_engines_own(client: Any, alone: Any, target: Target) -> None:
    prompt = target.encode_chat([{"role": "user", "content": "Hello"}])
    expected = alone(prompt, 16)
    reply = client.chat(max_tokens=16).json
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "tiny"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    assert reply["usage"]["total_tokens"] == len(prompt) + len(expected.tokens)


def test_text_parts_and_the_developer_role_are_accepted(client: Any) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    other = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    first, second = (client.chat(messages=messages).json["choices"] for messages in (plain, other))
    assert first == second


@each("path", ["chat", "complete"])
def test_chunks_joined_are_the_whole_answer(client: Any, path: str) -> None:
    ask = getattr(client, path)
    fields = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "n": 3}
    whole = ask(**fields).json
    events = ask(**fields, stream=True, stream_options={"include_usage": True}).events
    assert events[-1]["choices"] == []
    usages = [whole["usage"], events[-1]["usage"]]
    assert usages[0]["completion_tokens"] == usages[1]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        parts = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        if path == "chat":
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(part["delta"].get("content", "") for part in parts)
            assert text == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    client.all_back()


def test_a_stream_has_usage_only_on_request(client: Any) -> None:
    assert all("usage" not in event for event in client.chat(stream=True).events)


def test_a_seed_decides_and_choices_differ(client: Any) -> None:
    fields = {"temperature": 1.5, "max_tokens": 24, "seed": 2**63 - 1, "n": 2}
    first, second = (client.complete(**fields).json["choices"] for _ in range(2))
    assert first == second
    assert first[0]["text"] != first[1]["text"]


def test_prompts_may_be_texts_or_tokens_and_several(client: Any, target: Target) -> None:
    texts = ["abcabc", "xyzxyz"]
    ids = [target.tokenizer.encode(text) for text in texts]
    alone = [client.complete(prompt=text).json["choices"][0]["text"] for text in texts]
    for prompt in (texts, ids):
        choices = client.complete(prompt=prompt).json["choices"]
        assert [choice["text"] for choice in choices] == alone
        assert [choice["index"] for choice in choices] == [0, 1]
    assert client.complete(prompt=ids[0]).json["choices"][0]["text"] == alone[0]


def test_stop_strings_end_an_answer_and_are_cut_off(client: Any) -> None:
    text = client.complete(max_tokens=24).json["choices"][0]["text"]
    stop = text[5:7]
    for wish in (stop, [stop, "never"]):
        answer = client.complete(max_tokens=24, stop=wish).json
        (choice,) = answer["choices"]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == text.index(stop) + len(stop), "a letter is a token"


def test_stop_tokens_and_min_tokens_are_obeyed(client: Any, target: Target) -> None:
    text = client.complete(max_tokens=12).json["choices"][0]["text"]
    token = target.tokenizer.encode(text[3])[0]
    cut = client.complete(max_tokens=12, stop_token_ids=[token]).json
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == text.index(text[3]) + 1
    longer = client.complete(max_tokens=12, stop_token_ids=[token], min_tokens=12).json
    assert longer["usage"]["completion_tokens"] == 12
    bias = {str(target.tokenizer.encode("</s>")[0]): 100}
    assert client.complete(logit_bias=bias).json["usage"]["completion_tokens"] == 1
    assert client.complete(logit_bias=bias, ignore_eos=True).json["usage"]["completion_tokens"] == 8


def test_bias_and_penalties_reach_the_engine(client: Any, target: Target) -> None:
    letter = target.tokenizer.encode("q")[0]
    assert client.complete(logit_bias={str(letter): 100}).json["choices"][0]["text"] == "q" * 8
    fields = {"logit_bias": {str(letter): 20}, "max_tokens": 24}
    free = client.complete(**fields).json["choices"][0]["text"]
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 5}):
        assert client.complete(**fields, **penalty).json["choices"][0]["text"].count("q") <= free.count("q")


def test_chat_logprobs_cover_every_token(client: Any) -> None:
    reply = client.chat(logprobs=True, top_logprobs=3).json
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])
        assert bytes(entry["bytes"]).decode() == entry["token"]
    streamed = client.chat(logprobs=True, top_logprobs=3, stream=True).events
    told = [entry for event in streamed for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in told] == [entry["token"] for entry in content]


def test_completion_logprobs_have_offsets(client: Any) -> None:
    choice = client.complete(logprobs=2, ignore_eos=True).json["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(8))
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_acceptance_is_in_usage_and_on_request_for_each_token(client: Any) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True, "speculative": {"mode": "fixed", "depth": 3, "details": True}}
    reply = client.complete(**fields).json
    figures, (choice,) = reply["usage"]["speculative"], reply["choices"]
    assert figures["accepted_tokens"] > 0
    assert figures["acceptance_length"] == pytest.approx(1 + figures["accepted_tokens"] / figures["drafts"], abs=1e-4)
    assert sum(figures["accepted_by_depth"]) == figures["accepted_tokens"]
    told = choice["speculative"]
    assert "".join(told["texts"]) == choice["text"]
    assert len(told["depths"]) == len(told["tokens"]) == 40
    assert 0 < sum(depth > 0 for depth in told["depths"]) <= figures["accepted_tokens"]
    events = client.complete(**fields, stream=True).events
    parts = [event["choices"][0]["speculative"] for event in events]
    assert [depth for part in parts for depth in part["depths"]] == told["depths"]
    assert parts[-1]["accepted_tokens"] == told["accepted_tokens"]


def test_without_drafts_there_is_no_acceptance(client: Any) -> None:
    reply = client.complete(speculative={"mode": "off", "details": True}).json
    assert reply["usage"]["speculative"]["acceptance_length"] is None
    assert set(reply["choices"][0]["speculative"]["depths"]) == {0}


def test_a_character_of_several_tokens_comes_with_the_token_that_completes_it(eagle: Any) -> None:
    client, question = eagle
    ask = {"max_tokens": 40, "ignore_eos": True, "speculative": {"mode": "fixed", "depth": 3, "details": True}}
    (choice,) = client.chat(question, **ask).json["choices"]
    told, text = choice["speculative"], choice["message"]["content"]
    assert "".join(told["texts"]) == text == client.engine.target.decode(told["tokens"]).rstrip("\ufffd")
    assert told["texts"][:4] == ["", "", "", "🦅"]
    assert any(told["depths"][:3])  # parts of a character are accepted from drafts like anything else
    parts = [event["choices"][0] for event in client.chat(question, **ask, stream=True).events[1:]]
    for part in parts:
        told_now = part["speculative"]
        assert "".join(told_now["texts"]) == part["delta"].get("content", "")  # chunk by chunk, not only in the end
        assert len(told_now["tokens"]) == len(told_now["texts"]) == len(told_now["depths"])
        assert told_now["drafts"] <= told["drafts"]
    for name in ("tokens", "texts", "depths"):
        assert [one for part in parts for one in part["speculative"][name]] == told[name]
