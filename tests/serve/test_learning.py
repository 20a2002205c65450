"""Answers that are kept to learn from: only of those who opted in, only whole ones, and as `eyas adapt` reads them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from eyas.data.author_check import AuthorCheck
from eyas.data.bad_records import MAX_BAD_SHARE, BadRecords
from eyas.data.conversations import Conversation
from eyas.data.files import ConversationReader, expand_files
from eyas.errors import UserError
from eyas.serve.access.policy import ANY, AccessRules, access_rules, with_learning
from eyas.serve.learning import collector as collector_module
from eyas.serve.learning.answer_ring import LEAST_BYTES, AnswerRing
from eyas.serve.learning.collector import LearnFolder
from eyas.serve.model_info import ServerLimits
from eyas.target.parts import fingerprint
from eyas.train.corpus.encoding import encode_conversations
from serve.test_operation import LONG, fail_once, wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from eyas.target.model import Target

OPTED_IN, OTHER = "opted-in", "other"
EVERYBODY = AccessRules(learn_keys=(ANY,))


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {key}"}}


@contextmanager
def learning(
    new_server: Any, target: Target, folder: Path, access: AccessRules = EVERYBODY, **arguments: Any
) -> Iterator[Any]:
    ring = AnswerRing(folder, LEAST_BYTES)
    author = {"target": target.facts.source, "target_fingerprint": fingerprint(target.model)}
    with new_server(access=access, learn_folder=LearnFolder(ring=ring, author=author), **arguments) as client:
        yield client
    ring.close()


def read(folder: Path) -> list[Conversation]:
    """Read the folder like `eyas adapt`."""
    if not list(folder.glob("*.jsonl")):
        return []
    bad = BadRecords()
    kept = list(ConversationReader(expand_files([folder]), bad))
    assert not bad, list(bad.lines())
    return kept


def settled(client: Any, count: int) -> dict[str, Any]:
    """The status once so many answers are kept or dropped."""
    deadline = time.monotonic() + 10
    while True:
        status: dict[str, Any] = client.get("/status").json["learning"]
        if status["collected"] + status["dropped"] >= count:
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.01)


def test_answers_to_keys_without_opt_in_are_not_kept(new_server: Any, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    access = AccessRules(api_keys=(OPTED_IN, OTHER), learn_keys=(OPTED_IN,))
    asked = []
    with learning(new_server, target, folder, access) as client:
        for key, letter in ((OTHER, "o"), (OPTED_IN, "i")):
            text = letter * 9
            ask = {"temperature": 1, "max_tokens": 6, "seed": 3, "return_token_ids": True}
            chat = {"messages": [{"role": "user", "content": text}], **ask}
            bodies: list[tuple[str, dict[str, Any]]] = [
                ("/v1/chat/completions", chat | {"n": 3}),
                ("/v1/chat/completions", chat | {"stream": True, "seed": 4}),
                ("/v1/completions", {"prompt": [text, text + "a"], "n": 2, **ask}),
                ("/v1/completions", {"prompt": text, "stream": True, **ask, "seed": 5}),
                ("/v1/responses", {"input": text, "max_output_tokens": 6, "seed": 6}),
                ("/v1/responses", {"input": text, "max_output_tokens": 6, "seed": 7, "stream": True}),
            ]
            for path, body in bodies:
                reply = client.post(path, body, **bearer(key))
                assert reply.status == 200, reply.text
                if key == OPTED_IN and "choices" in reply.text and not body.get("stream"):
                    asked += [choice["token_ids"] for choice in reply.json["choices"]]
    kept = read(folder)
    assert len(kept) == 3 + 1 + 4 + 1 + 1 + 1
    letters = {(target.decode(one.samples[0].prompt_ids).count("i"), one.messages[0]["content"][:1]) for one in kept}
    assert all(count >= 9 and first == "i" for count, first in letters), letters
    assert all("ooo" not in str(one.messages) for one in kept)
    tokens = [list(one.samples[0].answer_ids) for one in kept]
    assert all(ids in tokens for ids in asked)
    text = "".join(file.read_text() for file in folder.glob("*.jsonl"))
    assert "ooo" not in text
    assert OPTED_IN not in text


def test_what_eyas_adapt_trains_on_is_every_token_that_was_served(
    new_server: Any, target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "answers"
    served = []
    with learning(new_server, target, folder) as client:
        for number in range(40):
            reply = client.chat("abc" + "de" * number, temperature=1, seed=number, return_token_ids=True).json
            served.append((reply["prompt_token_ids"], reply["choices"][0]["token_ids"], reply["choices"][0]))
    check = AuthorCheck(source="tiny", fingerprint=fingerprint(target.model), vocab_size=target.facts.vocab_size)
    kept = [check(one) for one in read(folder)]
    assert [(list(one.samples[0].prompt_ids), list(one.samples[0].answer_ids)) for one in kept] == [
        (prompt, answer) for prompt, answer, _ in served
    ]
    assert [one.messages[-1]["content"] for one in kept] == [choice["message"]["content"] for _, _, choice in served]
    assert [one.finished for one in kept] == [choice["finish_reason"] == "stop" for _, _, choice in served]
    corpus, counts = encode_conversations(kept, target.tokenizer, target.stop_ids(), max_length=256)
    assert counts.kept == len(served)
    assert corpus.trainable == sum(len(answer) for _, answer, _ in served)
    assert corpus.ids.tolist() == [token for prompt, answer, _ in served for token in (*prompt, *answer)]


def test_a_request_may_opt_out_and_one_that_asks_for_privacy_has_to_opt_in(
    new_server: Any, target: Target, tmp_path: Path
) -> None:
    with learning(new_server, target, tmp_path / "answers") as client:
        assert client.chat("no", speculative={"learn": False}).status == 200
        assert client.chat("salted", cache_salt="mine").status == 200
        assert client.chat("salted and no", cache_salt="mine", speculative={"learn": False}).status == 200
        assert client.chat("salted and yes", cache_salt="mine", speculative={"learn": True}).status == 200
        assert client.chat("not stored", store=False).status == 200
        body = {"input": "not stored either", "store": False, "max_output_tokens": 8}
        assert client.post("/v1/responses", body).status == 200
        assert client.chat("not stored and yes", store=False, speculative={"learn": True}).status == 200
        assert client.chat("stored", store=True).status == 200
        assert client.chat("plain").status == 200
    kept = ["salted and yes", "not stored and yes", "stored", "plain"]
    assert [one.messages[0]["content"] for one in read(tmp_path / "answers")] == kept


def test_learn_true_is_refused_without_learning(new_server: Any, target: Target, tmp_path: Path) -> None:
    with new_server() as client:
        client.chat(speculative={"learn": True}).assert_refused(400, "speculative.learn", "--learn")
        assert client.chat(speculative={"learn": False}).status == 200
        assert client.get("/status").json["learning"] is None
    access = AccessRules(api_keys=(OPTED_IN, OTHER), learn_keys=(OPTED_IN,))
    with learning(new_server, target, tmp_path / "answers", access) as client:
        body = {"prompt": "abc", "speculative": {"learn": True}}
        refused = client.post("/v1/completions", body, **bearer(OTHER))
        refused.assert_refused(400, "speculative.learn", "--learn-key")
        assert client.post("/v1/completions", body, **bearer(OPTED_IN)).status == 200


def test_incomplete_answers_are_not_kept(new_server: Any, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    with learning(new_server, target, folder) as client:
        fail_once(client.engine, RuntimeError("broken"), after=3)
        assert client.complete(**LONG).status == 500
        fail_once(client.engine, RuntimeError("broken"), after=3)
        assert "error" in client.complete(**LONG, stream=True).text
        assert client.complete(max_tokens=0, echo=True).status == 200
        asyncio.run(_leave(client))
        wait_until_idle(client)
        assert client.complete(prompt="the one", max_tokens=3).status == 200
    assert [one.messages[0]["content"] for one in read(folder)] == ["the one"]
    with learning(new_server, target, folder, limits=ServerLimits(request_seconds=0.05)) as client:
        slow = client.engine.step
        client.engine.step = lambda: (time.sleep(0.02), slow())[1]
        assert client.complete(**LONG).status == 504
        wait_until_idle(client)
    assert len(read(folder)) == 1


async def _leave(client: Any) -> None:
    """A client that goes while it is answered."""
    task = asyncio.create_task(client.send("POST", "/v1/completions", json=LONG))
    while not client.engine.busy:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_incomplete_lines_are_skipped_by_readers(new_server: Any, target: Target, tmp_path: Path) -> None:
    with learning(new_server, target, tmp_path / "answers") as client:
        client.chat("first")
        client.chat("second")
    (file,) = (tmp_path / "answers").glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-20])
    bad = BadRecords()
    kept = list(ConversationReader(expand_files([tmp_path / "answers"]), bad))
    assert [one.messages[0]["content"] for one in kept] == ["first"]
    assert len(bad) == 1
    bad.require_few(MAX_BAD_SHARE, "data.max_bad_share")


def test_equal_answers_to_one_request_are_kept_once(new_server: Any, target: Target, tmp_path: Path) -> None:
    with learning(new_server, target, tmp_path / "answers") as client:
        assert client.chat(n=4, temperature=0).status == 200
    assert len(read(tmp_path / "answers")) == 1


def test_a_write_that_fails_pauses_collecting_and_never_serving(
    new_server: Any, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "answers"
    with learning(new_server, target, folder) as client:
        client.chat("first")
        settled(client, 1)
        write = os.write

        def full(descriptor: int, data: Any) -> int:
            if threading.current_thread().name == "eyas-collector":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)

        monkeypatch.setattr("eyas.serve.learning.answer_ring.os.write", full)
        assert client.chat("secret words").status == 200
        assert client.chat("second").status == 200
        status = settled(client, 3)
        assert (status["collected"], status["dropped"], status["paused"]) == (1, 2, "No space left on device")
        told = client.get("/metrics").text
        assert "eyas_learn_paused 1.0" in told
        assert 'eyas_learn_answers_total{outcome="dropped"} 2.0' in told
        monkeypatch.undo()
        assert client.chat("third").status == 200
        assert settled(client, 4)["collected"] == 1, "it is not tried at once"
        client.application.context.collector._clock = lambda: time.monotonic() + collector_module.RETRY_SECONDS
        assert client.chat("fourth").status == 200
        status = settled(client, 5)
        assert (status["collected"], status["dropped"], status["paused"]) == (2, 3, None)
        assert status["bytes"] == sum(file.stat().st_size for file in folder.glob("*.jsonl"))
        assert f"eyas_learn_bytes {float(status['bytes'])}" in client.get("/metrics").text
    assert [one.messages[0]["content"] for one in read(folder)] == ["first", "fourth"]
    notices = [record.getMessage() for record in caplog.records if "learn" in record.getMessage()]
    assert len(notices) == 2, notices
    assert "No space left on device" in notices[0]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("bound", "most"), [("MAX_WAITING_TOKENS", 60), ("MAX_WAITING_ANSWERS", 2)])
def test_waiting_answers_are_bounded_and_others_counted(
    new_server: Any, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    with learning(new_server, target, tmp_path / "answers") as client:
        reached, gate, append = threading.Event(), threading.Event(), AnswerRing.append

        def wait(ring: AnswerRing, line: bytes) -> bool:
            reached.set()
            gate.wait(10)
            return append(ring, line)

        monkeypatch.setattr(AnswerRing, "append", wait)
        monkeypatch.setattr(collector_module, bound, most)
        for number in range(6):
            reply = client.complete(prompt="a" * (number + 1), max_tokens=16, ignore_eos=True)
            assert reply.status == 200
            assert reached.wait(10)  # one is being written, the others wait
        assert settled(client, 3)["dropped"] == 3
        gate.set()
        assert settled(client, 6)["collected"] == 3


def test_keys_opt_in_by_name_and_everybody_does_on_a_private_server() -> None:
    keyed = access_rules("0.0.0.0", api_keys=("a", "b"), admin_keys=("c",))
    assert with_learning(keyed, "0.0.0.0", ("b", "c")).learn_keys == ("b", "c")
    assert with_learning(keyed, "0.0.0.0", ("*",)).learn_keys == (ANY,)
    assert with_learning(access_rules("127.0.0.1"), "127.0.0.1", ()).learn_keys == (ANY,)
    assert with_learning(access_rules("0.0.0.0"), "0.0.0.0", ("*",)).learn_keys == (ANY,)
    with pytest.raises(UserError, match=r"none of the 2 has.*--learn-key"):
        with_learning(keyed, "0.0.0.0", ())
    with pytest.raises(UserError, match="everybody who can reach it"):
        with_learning(access_rules("0.0.0.0"), "0.0.0.0", ())
    with pytest.raises(UserError, match="SHA-256") as refused:
        with_learning(keyed, "0.0.0.0", ("very-secret",))
    assert "very-secret" not in str(refused.value)


def test_a_record_says_by_which_key_it_can_be_found_and_deleted(
    new_server: Any, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = AccessRules(api_keys=(OPTED_IN,), learn_keys=(OPTED_IN,))
    with caplog.at_level("INFO"), learning(new_server, target, tmp_path / "answers", access) as client:
        client.post("/v1/completions", {"prompt": "abc"}, **bearer(OPTED_IN))
        deadline = time.monotonic() + 10
        while not (kept := list((tmp_path / "answers").glob("*.jsonl"))) and time.monotonic() < deadline:
            time.sleep(0.01)
    (file,) = kept
    record = json.loads(file.read_text())
    assert record["key"] == next(line.fields["key"] for line in caplog.records if getattr(line, "fields", None))
