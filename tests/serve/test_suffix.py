"""Suffix drafts over HTTP: asked for by a request, counted by source, and never made of another key's answers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from eyas.engine.suffix.config import SuffixConfig
from serve.conftest import OPTIONS, Client, serve

if TYPE_CHECKING:
    from eyas.target.model import Target

WITH_SUFFIX = replace(OPTIONS, suffix=SuffixConfig(max_spec_factor=4.0))
FORCED = {"mode": "fixed", "depth": 6, "method": "suffix"}
REPEATS = "abcdefgabcdefgabcdefg"


@pytest.fixture(scope="module")
def suffixed(target: "Target") -> Iterator[Client]:
    with serve(target, None, options=WITH_SUFFIX, keys=("first", "second")) as client:
        yield client


def ask(client: Client, key: str = "first", **fields: Any) -> dict[str, Any]:
    body = {"prompt": REPEATS, "max_tokens": 30, "temperature": 0} | fields
    reply = client.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    return answer


def test_a_target_without_a_drafter_drafts_and_answers_as_without(suffixed: Client) -> None:
    plain = ask(suffixed, speculative={"mode": "off"})
    drafted = ask(suffixed, speculative=FORCED | {"details": True})
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert plain["usage"]["speculative"]["suffix_drafted_tokens"] == 0
    counts = drafted["usage"]["speculative"]
    assert counts["suffix_drafted_tokens"] == counts["drafted_tokens"] > 0
    assert counts["suffix_accepted_tokens"] == counts["accepted_tokens"]
    told = drafted["choices"][0]["speculative"]
    assert len(told["sources"]) == len(told["tokens"])
    by_source = [
        (source == "suffix") == (depth > 0) for source, depth in zip(told["sources"], told["depths"], strict=True)
    ]
    assert all(by_source)


def test_metrics_status_and_model_card_show_the_source(suffixed: Client) -> None:
    ask(suffixed, speculative=FORCED)
    headers = {"Authorization": "Bearer first"}
    counts = suffixed.get("/status", headers=headers).json["counts"]
    assert counts["suffix_drafted_tokens"] > 0
    text = suffixed.get("/metrics", headers=headers).text
    lines = [line.split(" ") for line in text.splitlines() if "_per_source_total{" in line]
    told = {name: float(value) for name, value in lines}
    name = "eyas_spec_decode_num_{}_tokens_per_source_total"
    assert told[name.format("draft") + '{source="suffix"}'] == counts["suffix_drafted_tokens"]
    assert told[name.format("accepted") + '{source="suffix"}'] == counts["suffix_accepted_tokens"]
    assert told[name.format("accepted") + '{source="drafter"}'] == 0
    card = suffixed.get("/v1/models", headers=headers).json["data"][0]["speculative"]
    assert (card["drafter"], card["suffix"], card["mode"], card["method"]) == (None, True, "auto", "auto")


def test_suffix_drafts_never_cross_keys(target: "Target") -> None:
    with serve(target, None, options=WITH_SUFFIX, keys=("first", "second")) as client:

        def drafted(key: str, **fields: Any) -> int:
            answer = ask(client, key, prompt="qkz", max_tokens=14, speculative=FORCED, **fields)
            return int(answer["usage"]["speculative"]["suffix_drafted_tokens"])

        alone = drafted("first")
        assert drafted("second") == alone
        assert drafted("first") > alone, "its own answer is there"
        assert drafted("first", cache_salt="other") == alone, "unless it says otherwise"
        client.all_back()


def test_a_method_without_a_drafter_is_refused(suffixed: Client, client: Client) -> None:
    headers = {"Authorization": "Bearer first"}
    body = {"prompt": "abc", "max_tokens": 4}
    for speculative, part in (
        ({"method": "eagle3"}, "there is no drafter"),
        ({"mode": "fixed", "depth": 3}, "there is no drafter"),
        ({"mode": "fixed", "depth": 25, "method": "suffix"}, "above the 24 suffix drafts"),
        ({"method": "ngram"}, "method"),
    ):
        suffixed.post("/v1/completions", body | {"speculative": speculative}, headers=headers).assert_refused(400, part)
    client.complete(speculative={"method": "suffix"}).assert_refused(400, "suffix drafts were asked for")
