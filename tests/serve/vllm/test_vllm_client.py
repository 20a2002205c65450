"""The server in front of vLLM: what clients get, what they are refused, and what vLLM sees of it."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from eyas.data.files import ConversationReader, expand_files
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.serve.access.policy import AccessRules
from eyas.serve.app import Application
from eyas.serve.drafter_swaps import DrafterSlot
from eyas.serve.learning.answer_ring import LEAST_BYTES, AnswerRing
from eyas.serve.learning.collector import LearnFolder
from eyas.serve.model_info import ModelInfo
from eyas.serve.vllm.client import VLLMEngineClient
from fake_vllm import FakeVLLM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEPTH = 3
FIXED = Speculation(mode="fixed", depth=DEPTH)


@contextmanager
def served(
    target: Any,
    drafter: Any,
    client_class: Any,
    depth: int | None = DEPTH,
    *,
    on_cpu: bool = False,
    access: AccessRules | None = None,
    learn_folder: LearnFolder | None = None,
) -> Iterator[tuple[Any, FakeVLLM]]:
    """A client of a server in front of a vLLM that is none."""
    engine = Engine(target, drafter, config=EngineConfig(max_num_seqs=4, max_model_len=256, memory=2**24))
    fake = FakeVLLM(engine, depth)
    speculation = None if depth is None else Speculation(mode="fixed", depth=depth)
    engine_client = VLLMEngineClient(
        fake,  # type: ignore[arg-type]
        lambda: fake,  # type: ignore[arg-type, return-value]
        target=target,
        model="tiny",
        speculation=speculation,
        max_depth=depth or 0,
        start_seconds=5,
        on_cpu=on_cpu,
    )
    with engine_client:
        info = ModelInfo(
            name="tiny",
            target="tiny",
            drafter=None if depth is None else "tiny-drafter",
            max_model_len=256,
            max_num_seqs=4,
            speculation=speculation or Speculation(),
            engine="vLLM 0.32.0",
            own_depths=False,
        )
        slot = DrafterSlot(model=None, load=lambda name: drafter, swappable=False, kept_because="vLLM cannot change it")
        application = Application(engine_client, info, slot=slot, access=access, learn_folder=learn_folder)
        yield client_class(application, [engine]), fake
        application.close()


@pytest.fixture(scope="module")
def vllm(target: Any, tiny_drafter: Any, client: Any) -> Iterator[tuple[Any, FakeVLLM]]:
    with served(target, tiny_drafter, type(client)) as both:
        yield both


def same(ours: Any, theirs: Any) -> None:
    """All that does not depend on when and by whom."""
    for reply in (ours, theirs):
        for name in ("id", "created", "metrics"):
            reply.pop(name, None)
        reply["usage"].pop("speculative")
    assert rounded(ours) == rounded(theirs)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


BODIES = [
    {"max_tokens": 12},
    {"max_tokens": 12, "stop": ["c", "zz"]},
    {"max_tokens": 12, "stop": ["b"], "include_stop_str_in_output": True},
    {"max_tokens": 6, "logprobs": 2},
    {"max_tokens": 3, "echo": True, "logprobs": 1},
    {"max_tokens": 3, "prompt_logprobs": 2},
    {"max_tokens": 5, "n": 2, "return_token_ids": True},
    {"max_tokens": 8, "repetition_penalty": 1.3, "ignore_eos": True},
    {"prompt": ["abc", "cab"], "max_tokens": 4},
]


@pytest.mark.parametrize("fields", BODIES, ids=str)
def test_a_greedy_answer_is_the_one_of_eyas_own_engine(client: Any, vllm: Any, fields: dict[str, Any]) -> None:
    own = client.complete(**fields, speculative={"mode": "fixed", "depth": DEPTH})
    through = vllm[0].complete(**fields)
    assert (own.status, through.status) == (200, 200), through.text
    same(through.json, own.json)


def test_a_chat_and_its_stream_say_the_same(client: Any, vllm: Any) -> None:
    own, whole = client.chat(max_tokens=10).json, vllm[0].chat(max_tokens=10).json
    assert whole["choices"][0]["message"] == own["choices"][0]["message"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = vllm[0].chat(max_tokens=10, **options).events
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
    assert text == own["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["speculative"]["drafts"] > 0


def test_answers_of_keys_that_opted_in_are_kept_with_the_tokens_of_vllm(
    target: Any, tiny_drafter: Any, client: Any, tmp_path: Path
) -> None:
    ring = AnswerRing(tmp_path / "answers", LEAST_BYTES)
    kept = LearnFolder(ring=ring, author={"target": target.facts.source})
    access = AccessRules(api_keys=("yes", "no"), learn_keys=("yes",))
    body = {"max_tokens": 12, "n": 2, "temperature": 1, "seed": 5, "return_token_ids": True}
    with served(target, tiny_drafter, type(client), access=access, learn_folder=kept) as (through, _):
        replies = {
            key: through.post(
                "/v1/completions", body | {"prompt": f"{key}abc"}, headers={"authorization": f"Bearer {key}"}
            ).json
            for key in ("no", "yes")
        }
    ring.close()
    found = list(ConversationReader(expand_files([ring.folder])))
    assert {one.messages[0]["content"] for one in found} == {"yesabc"}
    told = [choice["token_ids"] for choice in replies["yes"]["choices"]]
    assert sorted(list(one.samples[0].answer_ids) for one in found) == sorted(told)
    assert len(told) == 2


def test_how_drafting_went_is_told_as_vllm_counted_it(vllm: Any) -> None:
    reply = vllm[0].complete(max_tokens=20, ignore_eos=True, speculative={"details": True}).json
    told, steps = reply["usage"]["speculative"], reply["metrics"]["speculative_decoding"]
    assert told["drafts"] == steps["num_spec_steps"] == len(steps["per_step_drafted"]) > 0
    assert told["accepted_tokens"] == sum(steps["per_step_accepted"])
    assert told["passes"] + told["accepted_tokens"] >= 20
    details = reply["choices"][0]["speculative"]
    assert len(details["depths"]) == 20
    assert max(details["depths"]) <= DEPTH


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"speculative": {"mode": "off"}}, "speculative"),
        ({"speculative": {"mode": "fixed", "depth": 2}}, "speculative"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"min_p": 0.1, "temperature": 1}, "min_p"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"temperature": 0.001}, "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_vllm_cannot_do_is_refused_by_name(vllm: Any, fields: dict[str, Any], name: str) -> None:
    before = len(vllm[1].bodies)
    reply = vllm[0].complete(**fields)
    reply.assert_refused(400, name)
    assert reply.json["error"]["param"] == name
    assert len(vllm[1].bodies) == before


def test_on_a_cpu_nothing_is_drawn_while_there_is_a_drafter(target: Any, tiny_drafter: Any, client: Any) -> None:
    with served(target, tiny_drafter, type(client), on_cpu=True) as (front, _):
        front.complete(temperature=1).assert_refused(400, "temperature", "on a CPU")
        assert front.complete(temperature=0).status == 200
    with served(target, None, type(client), depth=None, on_cpu=True) as (front, _):
        assert front.complete(temperature=1).status == 200


def test_what_our_api_refuses_never_reaches_vllm(vllm: Any) -> None:
    before = len(vllm[1].bodies)
    for fields in ({"max_tokens": -1}, {"nonsense": 1}, {"model": "other"}, {"max_tokens": 10_000}):
        assert vllm[0].complete(**fields).status in (400, 404)
    assert len(vllm[1].bodies) == before


def test_the_served_depth_and_auto_are_no_reason_to_refuse(vllm: Any) -> None:
    for speculative in ({"mode": "fixed", "depth": DEPTH}, {"mode": "auto"}):
        assert vllm[0].complete(speculative=speculative).status == 200


def test_a_seed_goes_to_vllm_only_where_the_client_gave_one(vllm: Any) -> None:
    vllm[0].complete(temperature=1)
    assert "seed" not in vllm[1].bodies[-1]["sampling_params"]
    vllm[0].complete(temperature=1, seed=5)
    assert vllm[1].bodies[-1]["sampling_params"]["seed"] == 5
    vllm[0].complete(temperature=1, seed=-1)
    assert vllm[1].bodies[-1]["sampling_params"]["seed"] not in (-1, None)


def test_a_schema_goes_to_vllm_as_eyas_writes_json(vllm: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    json_schema = {"name": "s", "schema": schema}
    vllm[0].chat(response_format={"type": "json_schema", "json_schema": json_schema})
    told = vllm[1].bodies[-1]["sampling_params"]["structured_outputs"]["json"]
    assert told["properties"] == schema["properties"]
    assert told["x-guidance"]["whitespace_flexible"] is False


def test_errors_of_vllm_are_told_and_told_apart(target: Any, tiny_drafter: Any, client: Any) -> None:
    with served(target, tiny_drafter, type(client)) as (front, fake):
        fake.reply = 400, {"error": {"message": "too much of it", "code": 400}}
        front.complete().assert_refused(400, "vLLM refuses this request", "too much of it")
        fake.reply = 500, {"error": {"message": "secret internals", "code": 500}}
        reply = front.complete()
        reply.assert_refused(500, "engine failed")
        assert "internals" not in reply.text
        fake.reply, fake.cut_after = None, 1
        front.complete(max_tokens=30, ignore_eos=True).assert_refused(500, "engine failed")
        fake.cut_after = None
        assert front.complete().status == 200


def test_a_caller_that_leaves_frees_its_place_in_vllm(target: Any, tiny_drafter: Any, client: Any) -> None:
    with served(target, tiny_drafter, type(client)) as (front, fake):
        fake.pause = 0.05
        request = Request(prompt=(5, 6, 7), sampling=Sampling(), max_new_tokens=200, speculation=FIXED)

        async def leave() -> None:
            came = asyncio.Event()

            async def on_output(*_: Any) -> None:
                came.set()

            engine_client = front.application.context.engine_client
            running = asyncio.create_task(engine_client.generate([request, request], on_output))
            await asyncio.wait_for(came.wait(), 20)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for _ in range(200):
                if fake.left == 2 and not front.engine.busy:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError((fake.left, front.engine.busy))

        asyncio.run(leave())


def test_metrics_and_status_tell_what_vllm_counts(vllm: Any) -> None:
    status = vllm[0].get("/status").json
    assert status["served"]["engine"] == "vLLM 0.32.0"
    assert status["served"]["per_request"] is False
    assert status["load"] | {"running": 1, "waiting": 2} == status["load"]
    assert status["kv_blocks"] == {"total": 64, "used": 16, "cached": 0, "lookups": 20, "hits": 10}
    assert status["counts"]["accepted_by_depth"] == [30, 25]
    text = vllm[0].get("/metrics").text
    assert "eyas_spec_decode_num_drafts_total 40.0" in text
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 320.0' in text


def test_while_vllm_starts_again_requests_are_told_to_come_back(target: Any, tiny_drafter: Any, client: Any) -> None:
    with served(target, tiny_drafter, type(client)) as (front, _):
        supervisor = front.application.context.engine_client.supervisor
        supervisor.unavailable = "vLLM ended with code 1; it is started again"
        reply = front.complete()
        reply.assert_refused(503, "started again")
        assert int(reply.headers["retry-after"]) > 0
        assert front.get("/health").status == 503
        assert front.get("/health").json["status"] == front.get("/status").json["state"] == "restarting"
        supervisor.unavailable = None
        assert front.complete().status == 200


def test_the_drafter_stays_and_says_why(vllm: Any) -> None:
    vllm[0].post("/v1/drafter", {"model": "none"}).assert_refused(403, "vLLM")


def test_without_a_drafter_nothing_of_drafting_is_refused(target: Any, client: Any) -> None:
    with served(target, None, type(client), depth=None) as (front, fake):
        assert front.complete(speculative={"mode": "off"}, min_p=0.1, temperature=1).status == 200
        assert front.complete().json["usage"]["speculative"]["drafts"] == 0
        assert fake.bodies[-1]["sampling_params"]["ignore_eos"] is True
