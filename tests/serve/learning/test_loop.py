"""From answers to another drafter: swapped in if it is better, back again if it is not, and no answer changes."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from eyas.drafter.checkpoint import load_drafter
from eyas.serve.learning import loop, watch
from eyas.serve.learning.watch import LAST_LOOK
from serve.learning.loop_server import LearningServer, learning_server, noisy, write
from serve.test_operation import metrics

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from pathlib import Path

    from eyas.drafter.model import Drafter
    from eyas.target.model import Target


@pytest.fixture
def good(tiny_drafter: Drafter, tmp_path: Path) -> str:
    return write(tiny_drafter, tmp_path / "good")


@pytest.fixture
def weak(tiny_drafter: Drafter, tmp_path: Path) -> str:
    return write(noisy(tiny_drafter, 0.4), tmp_path / "weak")


@pytest.fixture
def random(tiny_drafter: Drafter, tmp_path: Path) -> str:
    return write(noisy(tiny_drafter, 1.0), tmp_path / "random")


async def probe(server: LearningServer) -> tuple[list[str], float]:
    """The server's answers to fixed questions, and how much was drafted right."""
    texts, accepted, drafts = [], 0, 0
    for number in range(6):
        body = {"prompt": f"q{number}", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        body |= {"speculative": {"mode": "fixed", "depth": 3, "learn": False}}
        reply = (await server.client.send("POST", "/v1/completions", json=body)).json
        texts.append(reply["choices"][0]["text"])
        accepted += reply["usage"]["speculative"]["accepted_tokens"]
        drafts += reply["usage"]["speculative"]["drafts"]
    return texts, accepted / drafts


def test_a_better_drafter_comes_to_work_in_place_and_no_answer_changes(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:

        async def main() -> None:
            server.plan(made=good)
            texts, before = await probe(server)
            await server.ask(32)
            await server.settled(32)
            status = await server.until(lambda status: status["state"] == "watching")
            assert status["last"]["outcome"] == "better", status
            assert await probe(server) == (texts, pytest.approx(before, abs=10)), "no answer changes"
            _, after = await probe(server)
            assert after > before, "and more of them is drafted right"
            while server.loop.state == "watching":
                await server.ask(8)
                await server.loop.tick()
            told = await server.learning()
            (swap,) = await server.changes()
            assert (swap["kind"], swap["drafter"].rpartition("-learnt-")[2]) == ("swap", "0001")
            assert "better" in swap["reason"]
            assert swap["after"] > swap["before"]
            assert told["learner"]["drafter"]["state"] == "confirmed"
            story = server.story(1)
            assert story["state"] == "confirmed"
            assert story["reason"].startswith("better: acceptance length")
            assert story["parent"] is None
            record = json.loads((server.folder / "drafters" / "0001" / "record.json").read_text())
            assert record["changes"]["traffic"]["gain"]["low"] > 0
            assert record["data"]["conversations"] == 96
            load_drafter(str(server.folder / "drafters" / "0001"))
            assert not (server.folder / "adaptation").exists(), "no copy of answers is left"
            assert (server.folder / "learner.log").read_text() == "adapting\n"

        asyncio.run(main())
        counted = metrics(server.client)
        assert counted["eyas_learn_attempts_total,outcome=better"] == 1
        assert counted["eyas_learn_swaps_total,kind=swap"] == 1
        assert counted["eyas_learn_drafter"] == 1
        assert server.client.get("/v1/drafter").json["drafter"] == "tiny-drafter-learnt-0001"
        server.client.all_back()


def test_a_drafter_that_is_not_better_does_not_come_to_work(
    new_server: Any, target: Target, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, good, tmp_path / "kept", kept=64) as server:

        async def main() -> None:
            status = await server.until(lambda status: status["last"] is not None)
            assert status["last"]["outcome"] == "not_better"
            assert "not better beyond the interval" in status["last"]["reason"]
            assert (status["state"], status["failures"], status["new_answers"]) == ("collecting", 0, 0)
            assert await server.changes() == []
            assert not (server.folder / "drafters").exists()

        asyncio.run(main())


def test_a_worse_drafter_past_the_gate_is_sent_back_before_the_watch_is_over(
    new_server: Any, target: Target, good: str, random: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound: it never serves longer than the watch takes, which is counted in passes; without help by alarms."""
    monkeypatch.setattr(loop, "_raised", lambda snapshot: frozenset())
    with learning_server(new_server, target, good, tmp_path / "kept", kept=64) as server:

        async def main() -> None:
            server.plan(made=random)
            _, before = await probe(server)
            await server.ask(32)
            await server.until(lambda status: status["state"] == "watching")
            _, forced = await probe(server)
            assert forced < before / 2, "it is really worse"
            passes = 0
            while server.loop.state == "watching":
                await server.ask(1)
                passes = max(passes, server.loop.rounds.passes)
                await server.loop.tick()
            assert passes <= 512 < LAST_LOOK, "eight short answers say it"
            assert (await probe(server))[1] == pytest.approx(before), "the old weights are back"
            told = await server.learning()
            swap, rollback = await server.changes()
            assert (swap["kind"], rollback["kind"]) == ("swap", "rollback")
            assert swap["drafter"] == f"{rollback['drafter']}-learnt-0001"
            assert swap["after"] < swap["before"]
            assert rollback["reason"].startswith("worse: acceptance length")
            assert told["learner"]["state"] == "backing_off"
            story = server.story(1)
            assert story["state"] == "rejected"
            assert story["reason"].startswith("worse: acceptance length")
            assert story["watch"]["change"]["high"] < 0

        asyncio.run(main())
        server.client.all_back()
    with learning_server(new_server, target, good, tmp_path / "kept") as server:
        assert server.loop.status()["drafter"] == {"number": 0}, "a rejected one is never taken up again"


def test_a_drafter_that_the_controller_gives_up_is_sent_back_at_the_last_look(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is hardly used leaves no drafts to count, and users without their speed."""
    monkeypatch.setattr(watch, "LAST_LOOK", 256)
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:

        async def main() -> None:
            server.plan(made=good)
            await server.ask(16)
            await server.until(lambda status: status["state"] == "watching")
            while server.loop.state == "watching":
                await server.ask(4, speculative={"mode": "off"})
                await server.loop.tick()
                assert server.loop.rounds.passes <= 256 + 4 * 16
            assert "hardly drafted with any more: 0 rounds" in server.story(1)["reason"]

        asyncio.run(main())


def test_a_server_that_starts_again_goes_on_where_it_was(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path
) -> None:
    async def learn(server: LearningServer) -> None:
        server.plan(made=good)
        await server.ask(16)
        await server.settled(16)
        await server.until(lambda status: status["state"] == "watching")
        await server.ask(3)
        await server.settled(19)

    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:
        asyncio.run(learn(server))
        after = asyncio.run(probe(server))
    with learning_server(new_server, target, weak, tmp_path / "kept", resume=False) as server:
        assert server.loop.status()["drafter"]["number"] == 0
        assert asyncio.run(probe(server))[1] < after[1]
    with learning_server(new_server, target, weak, tmp_path / "kept") as server:
        status = server.loop.status()
        assert (status["drafter"]["number"], status["state"], status["new_answers"]) == (1, "watching", 3)
        assert asyncio.run(probe(server)) == after
    with learning_server(new_server, target, good, tmp_path / "kept") as server:
        assert server.loop.status()["drafter"]["number"] == 0, "it came from another drafter than the one that is named"


def test_the_drift_alarm_asks_for_an_adaptation(
    new_server: Any, target: Target, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning_server(new_server, target, good, tmp_path / "kept", answers=1000, kept=64) as server:

        async def main() -> None:
            await server.loop.tick()
            assert server.loop.status()["attempts"] == 0
            drift = server.client.engine.drift
            monkeypatch.setattr(type(drift), "firing", True)
            status = await server.until(lambda status: status["last"] is not None)
            assert (status["attempts"], status["last"]["asked_by"]) == (1, "alarm")
            await server.loop.tick()
            assert server.loop.status()["attempts"] == 1, "and once for the same answers"

        asyncio.run(main())


@pytest.mark.parametrize("alarm", ["drift", "collapsed"])
def test_an_alarm_that_was_silent_before_the_swap_sends_the_drafter_back(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alarm: str
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:

        async def main() -> None:
            server.plan(made=good)
            await server.ask(16)
            await server.until(lambda status: status["state"] == "watching")
            engine = server.client.engine
            if alarm == "drift":
                monkeypatch.setattr(type(engine.drift), "firing", True)
            else:
                engine.controller.acceptance.collapsed = True
            await server.until(lambda status: status["state"] != "watching")
            assert f"the alarm {alarm} was raised" in server.story(1)["reason"]

        asyncio.run(main())


def test_a_drafter_that_an_operator_chooses_ends_what_was_under_way(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:
        server.client.application.context.learning_loop._swaps.slot.allowed = [good]

        async def main() -> None:
            server.plan(made=good)
            await server.ask(16)
            await server.until(lambda status: status["state"] == "watching")
            assert (await server.client.send("POST", "/v1/drafter", json={"model": good})).status == 200
            status = await server.until(lambda status: status["state"] != "watching")
            assert (status["drafter"]["number"], status["state"]) == (0, "collecting")
            assert (await server.client.send("GET", "/v1/drafter")).json["drafter"] == "good"

        asyncio.run(main())


def test_a_better_drafter_comes_without_a_baseline_where_the_one_at_work_has_collapsed(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:

        async def main() -> None:
            server.plan(made=good)
            await server.until(lambda status: status["state"] == "ready")
            await server.ask(4)
            await server.loop.tick()
            assert server.loop.state == "ready", "nothing is known of the one at work yet"
            server.client.engine.controller.acceptance.collapsed = True
            await server.until(lambda status: status["state"] == "watching")
            server.loop.rounds.passes = LAST_LOOK
            status = await server.until(lambda status: status["state"] != "watching")
            assert (status["drafter"]["number"], status["drafter"]["state"]) == (1, "confirmed")
            assert "nothing was known of the one before" in status["drafter"]["reason"]

        asyncio.run(main())


def test_copies_of_answers_go_as_soon_as_an_adaptation_has_ended(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:

        async def main() -> None:
            server.plan(made=good, seen=str(tmp_path / "seen"))
            await server.until(lambda status: status["state"] == "ready")
            assert len((tmp_path / "seen").read_text().splitlines()) == 64
            assert (server.folder / "adaptation" / "adapted" / "drafter").is_dir()
            assert not list(server.folder.rglob("answers.jsonl"))

        asyncio.run(main())


def test_answers_that_were_deleted_are_not_waited_for_and_cost_no_attempt(
    new_server: Any, target: Target, weak: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:
        for file in server.folder.glob("answers-*"):
            file.unlink()

        async def main() -> None:
            assert server.loop.new_answers == 64
            await server.loop.tick()
            status = server.loop.status()
            assert (status["state"], status["attempts"], status["new_answers"]) == ("collecting", 0, 0)

        asyncio.run(main())


def test_an_operator_who_is_quicker_has_the_last_word(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path
) -> None:
    """While a better drafter is put on the shelf, somebody chooses another one."""
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64) as server:
        add, slot = server.loop._shelf.add, server.loop._swaps.slot

        def late(*given: Any, **options: Any) -> Path:
            slot.source = good
            return add(*given, **options)

        server.loop._shelf.add = late  # type: ignore[method-assign]

        async def main() -> None:
            server.plan(made=good)
            await server.ask(16)
            status = await server.until(lambda status: status["last"] is not None and status["state"] != "ready")
            assert (status["drafter"]["number"], status["last"]["outcome"]) == (0, "refused")
            assert "another drafter was chosen meanwhile" in status["last"]["reason"]
            assert server.story(1)["state"] == "rejected"
            await server.loop.tick()
            assert (slot.source, server.loop._source) == (good, good)

        asyncio.run(main())


def test_a_learnt_drafter_that_is_deleted_while_it_serves_makes_way_for_the_first(
    new_server: Any, target: Target, weak: str, good: str, tmp_path: Path
) -> None:
    with learning_server(new_server, target, weak, tmp_path / "kept", kept=64, answers=64) as server:

        async def main() -> None:
            server.plan(made=good)
            await server.ask(16)
            await server.until(lambda status: status["state"] == "watching")
            server.loop._watch = None
            shutil.rmtree(server.folder / "drafters")
            server.plan()
            await server.ask(64)
            await server.settled(80)
            status = await server.until(lambda status: status["attempts"] == 2 and status["state"] != "adapting")
            assert (status["drafter"]["number"], status["last"]["outcome"]) == (0, "not_better")

        asyncio.run(main())
