"""vLLM's fields about what comes back: stop reasons, stop strings, special tokens, token ids; and about prompts."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def text(client: Any) -> str:
    """The greedy answer of 24 letters."""
    return str(client.complete(max_tokens=24, ignore_eos=True).json["choices"][0]["text"])


def choices_of(client: Any, **fields: Any) -> list[Any]:
    """The only choice, whole and as the last of a stream."""
    whole = client.complete(max_tokens=24, **fields).json["choices"][0]
    events = client.complete(max_tokens=24, **fields, stream=True).events
    joined = "".join(event["choices"][0]["text"] for event in events)
    return [whole, events[-1]["choices"][0] | {"text": joined}]


def test_stop_reason_has_the_stop_string(client: Any, text: str) -> None:
    for choice in choices_of(client, stop=[text[5:7], "never"], ignore_eos=True):
        assert choice["stop_reason"] == text[5:7]
        assert choice["text"] == text[: text.index(text[5:7])]
    for choice in choices_of(client, stop=[text[5:7]], include_stop_str_in_output=True, ignore_eos=True):
        assert choice["text"] == text[: text.index(text[5:7]) + 2]
        assert choice["finish_reason"] == "stop"


def test_stop_reason_has_the_requests_stop_token_only(client: Any, target: Any, text: str) -> None:
    (token,) = target.tokenizer.encode(text[3])
    for choice in choices_of(client, stop_token_ids=[token], ignore_eos=True):
        assert choice["stop_reason"] == token
        assert choice["text"] == text[: text.index(text[3])]
    for choice in choices_of(client, stop_token_ids=[token], ignore_eos=True, include_stop_str_in_output=True):
        assert choice["text"] == text[: text.index(text[3]) + 1]
    end = target.tokenizer.eos_token_id
    for choice in choices_of(client, logit_bias={str(end): 100}):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    for choice in choices_of(client, logit_bias={str(end): 100}, ignore_eos=True, stop_token_ids=[end]):
        assert choice["stop_reason"] == end
    assert all(choice["stop_reason"] is None for choice in choices_of(client, ignore_eos=True))


def test_special_tokens_are_shown_on_request(client: Any, target: Any) -> None:
    end = target.tokenizer.eos_token_id
    fields = {"logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 2}
    assert client.complete(**fields).json["choices"][0]["text"] == ""
    assert client.complete(**fields, skip_special_tokens=False).json["choices"][0]["text"] == "</s></s>"
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True, "ignore_eos": False}
    assert client.complete(**fields | shown).json["choices"][0]["text"] == "</s>"
    assert client.complete(spaces_between_special_tokens=False).status == 200


def test_only_allowed_tokens_come(client: Any, target: Any) -> None:
    allowed = target.tokenizer.encode("xyz")
    text = client.complete(allowed_token_ids=allowed, temperature=1, seed=1).json["choices"][0]["text"]
    assert text
    assert set(text) <= set("xyz")
    drafted = {"mode": "fixed", "depth": 3}
    assert (
        client.complete(allowed_token_ids=allowed, temperature=1, seed=1, speculative=drafted).json["choices"][0][
            "text"
        ]
        == text
    )
    client.complete(allowed_token_ids=[96]).assert_refused(400, "96", "95")
    client.complete(allowed_token_ids=[]).assert_refused(400, "allowed_token_ids")


def test_a_prompt_is_cut_from_the_left(client: Any, target: Any) -> None:
    long = "ab" * 150  # 300 tokens, above the 256 of the server
    ids = target.tokenizer.encode(long)
    fields = {"prompt": long, "return_token_ids": True}
    for most, kept in ((6, 6), (-1, 256 - 8)):
        choice = client.complete(truncate_prompt_tokens=most, **fields).json["choices"][0]
        assert choice["prompt_token_ids"] == ids[-kept:]
    assert client.complete(truncate_prompt_tokens=-1, prompt="ab", max_tokens=256).status == 400
    client.complete(truncate_prompt_tokens=257).assert_refused(400, "truncate_prompt_tokens", "257", "256")
    client.complete(truncate_prompt_tokens=0).assert_refused(400, "0 tokens")
    client.complete(truncate_prompt_tokens=-2).assert_refused(400, "truncate_prompt_tokens", "-2")


def test_token_ids_come_back(client: Any, target: Any) -> None:
    prompts = ["abc", "xy"]
    reply = client.complete(prompt=prompts, return_token_ids=True, ignore_eos=True).json["choices"]
    for prompt, choice in zip(prompts, reply, strict=True):
        assert choice["prompt_token_ids"] == target.tokenizer.encode(prompt)
        assert target.decode(choice["token_ids"]) == choice["text"]
    chat = client.chat(return_token_ids=True, ignore_eos=True).json
    assert chat["prompt_token_ids"] == target.encode_chat([{"role": "user", "content": "Hello"}])
    tokens = chat["choices"][0]["token_ids"]
    assert len(tokens) == chat["usage"]["completion_tokens"]
    events = client.chat(return_token_ids=True, ignore_eos=True, stream=True).events
    assert [event.get("prompt_token_ids") for event in events] == [chat["prompt_token_ids"]] + [None] * (
        len(events) - 1
    )
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == tokens
    events = client.complete(prompt="abc", return_token_ids=True, stream=True).events
    assert events[0]["choices"][0]["prompt_token_ids"] == target.tokenizer.encode("abc")
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])
    assert "token_ids" not in client.complete().json["choices"][0]


def test_logprobs_may_name_tokens_by_id(client: Any) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = client.chat(logprobs=True, top_logprobs=2, **fields).json["choices"][0]
    named = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert named == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(
        top["token"].startswith("token_id:") for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"]
    )
    logprobs = client.complete(logprobs=1, temperature=1.5, seed=3, **fields).json["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob  # beside the most likely one, if it is another
        assert len(top) <= 2


def test_cached_tokens_count_only_the_same_salt(new_server: Any) -> None:
    prompt = "abcd" * 20

    def cached(client: Any, **fields: Any) -> int:
        usage = client.complete(prompt=prompt, max_tokens=2, **fields).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with new_server() as client:
        assert cached(client) == 0
        found = cached(client)
        assert 0 < found < len(prompt)
        assert cached(client, n=3) == found, "a prompt counts once"
        assert cached(client, cache_salt="mine") == 0
        assert cached(client, cache_salt="mine") == found
        assert cached(client, prompt_logprobs=0) == 0
        usage = client.complete(prompt=[prompt, prompt], max_tokens=2).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * found
    with new_server(keys=("one", "two")) as client:
        keys = [{"authorization": f"Bearer {key}"} for key in ("one", "one", "two")]
        body = {"prompt": prompt, "max_tokens": 2}
        told = [client.post("/v1/completions", body, headers=key).json["usage"] for key in keys]
        assert [one["prompt_tokens_details"]["cached_tokens"] for one in told] == [0, found, 0]


def test_bad_words_do_not_come(client: Any, text: str) -> None:
    word = text[2:4]
    for fields in ({"speculative": {"mode": "off"}}, {"speculative": {"mode": "fixed", "depth": 3}}):
        told = client.complete(max_tokens=24, ignore_eos=True, bad_words=[word], **fields).json["choices"][0]["text"]
        assert word not in told
        assert told.startswith(text[:3])
    client.complete(bad_words=[" "]).assert_refused(400, "bad_words")
    client.complete(bad_words=["a"] * 129).assert_refused(400, "bad_words", "128")
    client.complete(bad_words=["a"], structured_outputs={"regex": "a+"}).assert_refused(400, "bad_words", "grammar")
