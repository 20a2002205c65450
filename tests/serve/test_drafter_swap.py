"""POST /v1/drafter: another drafter at work, with answers under way; a failed load leaves all as it was."""

from __future__ import annotations

import asyncio
import logging
import threading
from copy import deepcopy
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from eyas.errors import UserError
from eyas.serve.access.policy import AccessRules
from eyas.serve.model_info import ServerLimits
from serve.test_operation import metrics
from serve.test_sockets import slow_down
from tiny import drafter_config, random_drafter

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter

DRAFTERS = ("good/tiny-drafter", "random", "stranger", "nowhere", "slow")
LONG = {"prompt": "abcabc", "max_tokens": 120, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def load(tiny_drafter: Drafter) -> Any:
    """Drafters by name."""

    def by_name(name: str) -> Drafter:
        if name == "good/tiny-drafter":
            return tiny_drafter
        if name == "random":
            return random_drafter(drafter_config(aux_layer_ids=(0, 1, 2)))
        if name == "stranger":
            return random_drafter(drafter_config(vocab_size=200))
        raise UserError(f"{name} is neither a folder nor a hub id; name a drafter")

    return by_name


def swap(client: Any, name: Any, **fields: Any) -> Any:
    return client.post("/v1/drafter", {"model": name, **fields})


def test_answers_under_way_go_on_while_drafters_change(new_server: Any, load: Any) -> None:
    with new_server(load=load, drafters=DRAFTERS) as client:
        expected = client.complete(**LONG).json["choices"][0]["text"]
        slow_down(client, 0.01)

        async def main() -> tuple[list[Any], list[Any]]:
            ways = ({"mode": "auto"}, {"mode": "fixed", "depth": 3}, {"mode": "off"}, {"mode": "fixed", "depth": 2})
            asked = [
                asyncio.create_task(client.send("POST", "/v1/completions", json=LONG | {"speculative": way}))
                for way in ways
            ]
            swaps = []
            for name in ("random", "none", "good/tiny-drafter", "random"):
                await asyncio.sleep(0.03)
                swaps.append(await client.send("POST", "/v1/drafter", json={"model": name}))
                assert not all(task.done() for task in asked)
            return await asyncio.gather(*asked), swaps

        replies, swaps = asyncio.run(main())
        assert [reply.json["choices"][0]["text"] for reply in replies] == [expected] * 4
        assert [reply.json["drafter"] for reply in swaps] == ["random", None, "tiny-drafter", "random"]
        assert [reply.json["mode"] for reply in swaps] == ["auto", "off", "auto", "auto"]
        assert [reply.json["in_place"] for reply in swaps] == [False] * 4
        assert client.get("/v1/drafter").json | {"in_place": False} == swaps[-1].json
        assert client.get("/v1/models/tiny").json["speculative"]["drafter"] == "random"
        told = metrics(client)
        assert told["eyas_drafter_info,drafter=random"] == 1
        assert "eyas_drafter_info,drafter=tiny-drafter" not in told
        assert told["eyas_drafter_swaps_total"] == 4
        changes = client.get("/status").json["drafter_changes"]
        assert [(one["kind"], one["drafter"]) for one in changes] == [
            ("swap", name) for name in ("random", None, "tiny-drafter", "random")
        ]
        assert all(0 <= one["at_seconds"] <= two["at_seconds"] for one, two in pairwise(changes))
        client.all_back()


def test_weights_of_the_same_shape_are_copied_into_place_and_the_reply_says_so(
    new_server: Any, tiny_drafter: Drafter
) -> None:
    def load(name: str) -> Drafter:
        if name == "good/tiny-drafter":
            return deepcopy(tiny_drafter)
        worse = deepcopy(tiny_drafter)
        worse.fc.weight.data.zero_()
        return worse

    fields = {"speculative": {"mode": "fixed", "depth": 3}, "max_tokens": 24, "temperature": 0}
    with new_server(load=load, drafters=DRAFTERS) as client:
        swap(client, "none")
        assert swap(client, "good/tiny-drafter").json["in_place"] is False  # there was none

        def ask() -> tuple[Any, int]:
            reply = client.complete(**fields).json
            return reply["choices"], reply["usage"]["speculative"]["accepted_tokens"]

        expected, accepted = ask()
        worse = swap(client, "random").json
        assert (worse["in_place"], worse["drafter"]) == (True, "random")
        choices, fewer = ask()
        assert choices == expected
        assert fewer < accepted

        def broken() -> None:
            raise ValueError("worn out")

        client.engine.step = broken
        client.complete().assert_refused(500, "ValueError")
        assert len(client.engines) == 2
        assert ask() == (expected, fewer), "an engine that is built again has the new weights"
        assert swap(client, "good/tiny-drafter").json["in_place"] is True
        assert ask() == (expected, accepted), "and back"
        assert "in_place" not in client.get("/v1/drafter").json


def test_the_servers_own_depth_comes_with_the_drafter(new_server: Any, load: Any) -> None:
    with new_server(load=load, drafters=DRAFTERS) as client:
        assert swap(client, "good/tiny-drafter", num_speculative_tokens=2).json["depth"] == 2
        figures = client.complete(max_tokens=24).json["usage"]["speculative"]
        assert len(figures["accepted_by_depth"]) == 2
        swap(client, "none")
        assert client.complete(max_tokens=24).json["usage"]["speculative"]["drafts"] == 0
        client.complete(speculative={"mode": "fixed", "depth": 2}).assert_refused(400, "no drafter")
        swap(client, "none", num_speculative_tokens=2).assert_refused(400, "num_speculative_tokens", "no drafter")
        swap(client, "random", num_speculative_tokens=99).assert_refused(400, "num_speculative_tokens", "7")


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"model": "nowhere"}, ["nowhere", "name a drafter"]),
        ({"model": "stranger"}, ["vocab_size is 200"]),
        ({"model": 3}, ["model", "3"]),
        ({"model": ""}, ["model"]),
        ({}, ["model is missing"]),
        ({"model": "random", "depth": 3}, ["depth"]),
        ({"model": "random", "num_speculative_tokens": 0}, ["num_speculative_tokens", "0"]),
    ],
)
def test_a_drafter_that_fails_to_load_changes_nothing(new_server: Any, load: Any, body: Any, parts: list[str]) -> None:
    with new_server(load=load, drafters=DRAFTERS) as client:
        before = client.get("/v1/drafter").json, client.complete(max_tokens=24).json["choices"]
        client.post("/v1/drafter", body).assert_refused(400, *parts)
        assert (client.get("/v1/drafter").json, client.complete(max_tokens=24).json["choices"]) == before
        fields = {"speculative": {"mode": "fixed", "depth": 3}, "max_tokens": 24}
        assert client.complete(**fields).json["usage"]["speculative"]["accepted_tokens"] > 0


def test_loading_blocks_nobody_and_runs_once_at_a_time(new_server: Any, tiny_drafter: Drafter) -> None:
    go_on = threading.Event()

    def slowly(name: str) -> Drafter:
        assert go_on.wait(20)
        return tiny_drafter

    with new_server(load=slowly, drafters=DRAFTERS, limits=ServerLimits(queue=2)) as client:

        async def main() -> tuple[Any, Any, Any]:
            first = asyncio.create_task(client.send("POST", "/v1/drafter", json={"model": "slow"}))
            await asyncio.sleep(0.05)
            second = await client.send("POST", "/v1/drafter", json={"model": "slow"})
            answer = await client.send("POST", "/v1/completions", json=LONG | {"max_tokens": 4})
            go_on.set()
            return await first, second, answer

        first, second, answer = asyncio.run(main())
        assert first.json["drafter"] == "slow"
        second.assert_refused(409, "being loaded")
        assert answer.status == 200


def test_an_engine_that_is_replaced_has_the_new_drafter(new_server: Any, load: Any) -> None:
    with new_server(load=load, drafters=DRAFTERS) as client:
        swap(client, "none")

        def broken() -> None:
            raise ValueError("worn out")

        client.engine.step = broken
        client.complete().assert_refused(500, "ValueError")
        assert len(client.engines) == 2
        assert not client.engine.drafts
        assert client.complete().status == 200


def test_only_listed_drafters_are_loaded(new_server: Any, load: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    def noted(name: str) -> Drafter:
        asked.append(name)
        drafter: Drafter = load(name)
        return drafter

    with new_server(load=noted, drafters=("good/tiny-drafter",)) as client:
        for name in ("random", "good", "../tiny-drafter", "/etc", "someone/their-drafter", "x" * 5000):
            reply = swap(client, name)
            reply.assert_refused(403, "operator", "tiny-drafter, smollm2-eagle3.1, none")
            assert len(reply.text) < 500
        assert asked == []
        assert swap(client, "tiny-drafter").json["drafter"] == "tiny-drafter"  # as GET calls it
        assert asked == ["good/tiny-drafter"]


def test_a_server_may_keep_its_drafter(new_server: Any, load: Any) -> None:
    with new_server(load=load, drafters=DRAFTERS, swappable=False) as client:
        swap(client, "none").assert_refused(403, "--no-drafter-swap")
        assert client.get("/v1/drafter").json["drafter"] == "tiny-drafter"


def test_only_an_administrator_may_swap_where_there_are_keys(new_server: Any, load: Any) -> None:
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("user", "admin"))
    for rules, headers, status in (
        (AccessRules(api_keys=("user",), admin_keys=("admin",)), {}, 401),
        (AccessRules(api_keys=("user",), admin_keys=("admin",)), user, 403),
        (AccessRules(admin_keys=("admin",)), {}, 401),
        (AccessRules(admin_keys=("admin",)), user, 401),
        (AccessRules(api_keys=("user",)), user, 403),
        (AccessRules(open_changes=False), {}, 403),
    ):
        with new_server(load=load, drafters=DRAFTERS, access=rules) as client:
            reply = client.post("/v1/drafter", {"model": "none"}, headers=headers)
            reply.assert_refused(status, "key")
            assert client.get("/v1/drafter", headers=admin if rules.admin_keys else user).json["drafter"]
            if rules.admin_keys:
                assert client.post("/v1/drafter", {"model": "none"}, headers=admin).json["drafter"] is None
                assert client.get("/v1/models", headers=admin).status == 200


def test_every_change_is_logged_with_its_caller(new_server: Any, load: Any, caplog: pytest.LogCaptureFixture) -> None:
    rules = AccessRules(api_keys=("user",), admin_keys=("admin",))
    with (
        new_server(load=load, drafters=DRAFTERS, access=rules) as client,
        caplog.at_level(logging.INFO, logger="eyas.serve"),
    ):
        for key in ("user", "admin"):
            client.post("/v1/drafter", {"model": "random"}, headers={"authorization": f"Bearer {key}"})
    refused, change = (record.fields for record in caplog.records)
    assert refused["outcome"] == "admin_key_required"
    assert refused["key"] == sha256(b"user").hexdigest()[:8]
    assert change == {
        "what": "drafter",
        "before": "tiny-drafter",
        "after": "random",
        "in_place": False,
        "client": "127.0.0.1",
        "key": sha256(b"admin").hexdigest()[:8],
    }
