"""POST /v1/drafter: another drafter at work, with answers under way; a failed load leaves all as it was."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from eyas.errors import UserError
from eyas.serve.model_info import ServerLimits
from serve.test_operation import metrics
from serve.test_sockets import slow_down
from tiny import drafter_config, random_drafter

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter

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
    with new_server(load=load) as client:
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
        assert client.get("/v1/drafter").json == swaps[-1].json
        assert client.get("/v1/models/tiny").json["speculative"]["drafter"] == "random"
        told = metrics(client)
        assert told["eyas_drafter_info,drafter=random"] == 1
        assert "eyas_drafter_info,drafter=tiny-drafter" not in told
        assert told["eyas_drafter_swaps_total"] == 4
        client.all_back()


def test_the_servers_own_depth_comes_with_the_drafter(new_server: Any, load: Any) -> None:
    with new_server(load=load) as client:
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
def test_a_drafter_that_cannot_be_had_leaves_all_as_it_was(
    new_server: Any, load: Any, body: Any, parts: list[str]
) -> None:
    with new_server(load=load) as client:
        before = client.get("/v1/drafter").json, client.complete(max_tokens=24).json["choices"]
        client.post("/v1/drafter", body).assert_refused(400, *parts)
        assert (client.get("/v1/drafter").json, client.complete(max_tokens=24).json["choices"]) == before
        fields = {"speculative": {"mode": "fixed", "depth": 3}, "max_tokens": 24}
        assert client.complete(**fields).json["usage"]["speculative"]["accepted_tokens"] > 0


def test_loading_holds_up_nobody_and_happens_once_at_a_time(new_server: Any, tiny_drafter: Drafter) -> None:
    go_on = threading.Event()

    def slowly(name: str) -> Drafter:
        assert go_on.wait(20)
        return tiny_drafter

    with new_server(load=slowly, limits=ServerLimits(queue=2)) as client:

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
    with new_server(load=load) as client:
        swap(client, "none")

        def broken() -> None:
            raise ValueError("worn out")

        client.engine.step = broken
        client.complete().assert_refused(500, "ValueError")
        assert len(client.engines) == 2
        assert not client.engine.drafts
        assert client.complete().status == 200


def test_only_holders_of_a_key_may_swap(new_server: Any, load: Any) -> None:
    with new_server(load=load, keys=("first",)) as client:
        swap(client, "none").assert_refused(401, "API key")
        headers = {"authorization": "Bearer first"}
        assert client.post("/v1/drafter", {"model": "none"}, headers=headers).json["drafter"] is None
