"""Served states train a drafter as the target itself does, and faults only cost time."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

import tiny
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features, FetchingSource, InterruptedWaitError
from eyas.train.loop import estimate, train
from eyas.train.ranks import Ranks
from eyas.train.recipe import Recipe
from eyas.train.schedule import RunLength
from eyas.train.served.command import StatesServer as Command
from eyas.train.served.command import captured_layers, require_servable
from eyas.train.served.open import OpenServed, open_served
from eyas.train.sources.live import LiveSource
from train.states_server import StatesServer
from train.test_cache import recipe_of, trained
from train.test_loop import Diary, corpus_of, loop_config_of, packs_of, train_state_of

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tiny_target: Target, tmp_path: Path) -> Iterator[StatesServer]:
    server = StatesServer(tiny_target, tmp_path / "states", tiny.AUX_IDS).start()
    yield server
    if server._http is not None:
        server.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.train.served.fetcher.PAUSES", (0.05, 0.2))
    monkeypatch.setattr("eyas.train.served.client.FILE_SECONDS", 0.5)


def served_recipe(server: StatesServer, output: Path, **features: object) -> Recipe:
    values = {"source": "served", "servers": [server.url], "states_folder": str(server.folder), "in_flight": 4}
    recipe: Recipe = recipe_of(output, **{**values, **features})
    return recipe


def opened(server: StatesServer, output: Path, *, target: Target | None = None, **options: Any) -> Any:
    features = {key: options.pop(key) for key in list(options) if key not in ("stop", "ranks")}
    parts = TargetParts.of(target or server.target)
    recipe = served_recipe(server, output, **features)
    return open_served(recipe, parts, tiny.AUX_IDS, **{"ranks": Ranks(), **options})


def source_of(open_source: OpenServed) -> FetchingSource:
    source = open_source(tiny.AUX_IDS, compiled=False)
    assert isinstance(source, FetchingSource)
    return source


def a_batch(seed: int = 0) -> TrainingBatch:
    return packs_of(corpus_of(12, seed=seed), length=100).epoch(0)[0].build()


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def learnt(target: Target, batch: TrainingBatch, features: Features) -> tuple[float, list[torch.Tensor]]:
    state = train_state_of(target)
    state.backward(batch, features, batch.counts(3))
    return float(state.metrics_3S[0].sum()), [gradient.clone() for gradient in state.gradients()]


def test_served_states_give_the_loss_and_gradients_of_live_ones(server: StatesServer, tmp_path: Path) -> None:
    batch, target = a_batch(), server.target
    with opened(server, tmp_path / "run") as open_source:
        ours, our_gradients = learnt(target, batch, source_of(open_source)(batch))
    theirs, their_gradients = learnt(target, batch, LiveSource(target, tiny.AUX_IDS)(batch))
    assert ours == pytest.approx(theirs, rel=1e-5)
    for a, b in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert any(bool(gradient.abs().max() > 0) for gradient in our_gradients)
    assert list(server.folder.iterdir()) == []


def test_padding_is_never_requested(server: StatesServer, tmp_path: Path) -> None:
    packs = replace(packs_of(corpus_of(12), length=100), padded=True)
    batch = packs.epoch(0)[0].build()
    assert len(batch.ids_T) == 100
    with opened(server, tmp_path / "run") as open_source:
        features = source_of(open_source)(batch)
    asked = [ids for ids in server.asked if len(ids) == 24]
    assert len(asked) == 4
    live = LiveSource(server.target, tiny.AUX_IDS)(batch)
    torch.testing.assert_close(features.aux_TX[:96], live.aux_TX[:96], rtol=1e-4, atol=1e-5)


def test_a_drafter_may_read_some_of_the_layers(server: StatesServer, tmp_path: Path) -> None:
    batch = a_batch()
    with opened(server, tmp_path / "run") as open_source:
        features = open_source((3,), compiled=False)(batch)
    expected = LiveSource(server.target, (3,))(batch)
    torch.testing.assert_close(features.aux_TX, expected.aux_TX, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", ["status 400", "status 500", "no file", "other ids", "torn", "error"])
def test_a_failed_document_teaches_nothing_and_is_counted(fault: str, server: StatesServer, tmp_path: Path) -> None:
    batch = a_batch()
    lost = batch.ids_T[24:48].tolist()
    server.fault = lambda ids: fault if ids == lost else None
    with opened(server, tmp_path / "run") as open_source:
        source = source_of(open_source)
        rest = source.available(batch)
        assert not bool(((rest.row_M >= 24) & (rest.row_M < 48)).any())
        assert len(rest.row_M) == len(batch.row_M) * 3 // 4
        loss, gradients = learnt(server.target, rest, source(rest))
        assert open_source.record()["failed"] == 1
    live = LiveSource(server.target, tiny.AUX_IDS)
    theirs, their_gradients = learnt(server.target, batch.without([1]), live(batch.without([1])))
    assert loss == pytest.approx(theirs, rel=1e-5)
    for a, b in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert list(server.folder.iterdir()) == []


def test_a_transient_fault_is_retried_and_not_counted(server: StatesServer, tmp_path: Path) -> None:
    batch, before = a_batch(), dict.fromkeys(range(4), 0)

    def twice(ids: list[int]) -> str | None:
        place = next((k for k in before if ids == batch.ids_T[24 * k : 24 * k + 24].tolist()), None)
        if place is None or before[place] == 2:
            return None
        before[place] += 1
        return "status 500"

    server.fault = twice
    with opened(server, tmp_path / "run") as open_source:
        source = source_of(open_source)
        assert source.available(batch) is batch
        source(batch)
        assert (open_source.record()["failed"], open_source.record()["retried"]) == (0, 8)


def test_no_document_is_lost_while_a_server_fails(server: StatesServer, tmp_path: Path) -> None:
    batch, broken = a_batch(), threading.Event()
    server.fault = lambda ids: "status 500" if broken.is_set() else None
    with opened(server, tmp_path / "run") as open_source:
        source = source_of(open_source)
        source(batch)
        broken.set()
        source.prefetch(batch)
        time.sleep(0.5)
        broken.clear()
        assert source.available(batch) is batch
        assert open_source.record()["failed"] == 0


def test_a_batch_without_documents_has_no_gradients(server: StatesServer, tmp_path: Path) -> None:
    batch = a_batch()
    server.fault = lambda ids: "status 400" if len(ids) == 24 else None
    with opened(server, tmp_path / "run") as open_source:
        source = source_of(open_source)
        rest = source.available(batch)
        assert rest.counts(3) == [0, 0, 0]
        _, gradients = learnt(server.target, rest, source(rest))
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def losses_of(recipe: Recipe, target: Target, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Diary:
    with (
        open_served(recipe, TargetParts.of(target), tiny.AUX_IDS, ranks=Ranks()) as open_source,
        monkeypatch.context() as patch,
    ):
        patch.setattr("train.test_cache.opened_source", lambda _: open_source)
        return trained(patch, target, recipe, **options)[1]


def test_a_whole_run_learns_what_a_live_one_does(
    server: StatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, live = trained(monkeypatch, server.target, recipe_of(tmp_path / "live", source="live"))
    served = losses_of(served_recipe(server, tmp_path / "served"), server.target, monkeypatch)
    assert served.losses() == pytest.approx(live.losses(), rel=1e-3)
    for step, counts in live.estimates.items():
        assert served.estimates[step]["drafter"] == counts["drafter"]


def test_a_restarted_server_changes_no_loss(server: StatesServer, tmp_path: Path) -> None:
    def losses(output: Path, *, killed: bool) -> list[float]:
        diary, state = Diary(), train_state_of(server.target)
        with opened(server, output) as open_source:
            began = threading.Event()
            if killed:
                threading.Thread(target=_kill_and_restart, args=(server, began), daemon=True).start()
            train(
                [state],
                packs_of(corpus_of(120)),
                [],
                source_of(open_source),
                loop_config_of(output, length=RunLength(steps=20), log_every=1),
                observer=diary,
                on_first_step=began.set,
            )
            assert open_source.record()["failed"] == 0
        return diary.losses()

    server.pause = 0.02
    uninterrupted = losses(tmp_path / "one", killed=False)
    assert losses(tmp_path / "other", killed=True) == pytest.approx(uninterrupted, rel=1e-6)
    assert list(server.folder.iterdir()) == []


def _kill_and_restart(server: StatesServer, began: threading.Event) -> None:
    began.wait()
    server.stop()
    time.sleep(1)
    server.start()


WORKER = """
import json, sys, torch
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import tiny
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.loop import train
from eyas.train.ranks import Ranks
from eyas.train.recipe_file import read_recipe
from eyas.train.served.open import open_served
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from train.test_loop import Diary, corpus_of, loop_config_of, packs_of, train_state_of
torch.set_num_threads(1)
folder = Path(sys.argv[1])
model = LlamaForCausalLM.from_pretrained(folder / "target").eval().requires_grad_(False)
target = Target(facts=facts_of(model.config, "tiny"), model=model, tokenizer=PreTrainedTokenizerBase())
ranks, diary = Ranks.join(), Diary()
recipe = read_recipe(json.loads(sys.argv[2]))
with open_served(recipe, TargetParts.of(target), tiny.AUX_IDS, ranks=ranks) as open_source:
    source = open_source(tiny.AUX_IDS, compiled=False)
    held_out = packs_of(corpus_of(16, seed=9)).epoch(0)
    config = loop_config_of(folder / "two", eval_every=3)
    train([train_state_of(target)], packs_of(corpus_of(24)), held_out, source, config, observer=diary, ranks=ranks)
if ranks.is_main:
    lengths = {step: counts["drafter"].accepted_at for step, counts in diary.estimates.items()}
    (folder / "said.json").write_text(json.dumps([diary.losses(), sorted(lengths.items())]))
ranks.leave()
"""


def test_two_trainers_with_one_server_learn_what_one_does(server: StatesServer, tmp_path: Path) -> None:
    diary = Diary()
    held_out = packs_of(corpus_of(16, seed=9)).epoch(0)
    assert len(held_out) > 2  # shared between both processes
    train(
        [train_state_of(server.target)],
        packs_of(corpus_of(24)),
        held_out,
        LiveSource(server.target, tiny.AUX_IDS),
        loop_config_of(tmp_path / "one", eval_every=3),
        observer=diary,
    )
    server.target.model.save_pretrained(tmp_path / "target")
    (tmp_path / "worker.py").write_text(WORKER)
    root = Path(__file__).parent.parent
    paths = [str(root), str(root.parent / "src")]
    recipe = json.dumps(served_recipe(server, tmp_path / "two").resolved())
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    subprocess.run(
        [*command, str(tmp_path / "worker.py"), str(tmp_path), recipe, *paths],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=600,
    )
    losses, lengths = json.loads((tmp_path / "said.json").read_text())
    assert losses == pytest.approx(diary.losses(), rel=1e-4)
    expected = {step: counts["drafter"].accepted_at for step, counts in diary.estimates.items()}
    assert [[step, list(accepted)] for step, accepted in sorted(expected.items())] == lengths
    assert list(server.folder.iterdir()) == []


def test_one_of_two_servers_may_stay_away(tiny_target: Target, server: StatesServer, tmp_path: Path) -> None:
    other = StatesServer(tiny_target, server.folder, tiny.AUX_IDS).start()
    batch = a_batch()
    with opened(server, tmp_path / "run", servers=[server.url, other.url]) as open_source:
        source = source_of(open_source)
        source(batch)
        other.stop()
        for seed in range(3):
            later = a_batch(seed)
            assert source.available(later) is later
            source(later)
        assert open_source.record()["failed"] == 0


def test_files_and_memory_stay_within_ahead_gb(server: StatesServer, tmp_path: Path) -> None:
    batches = [planned.build() for planned in packs_of(corpus_of(120)).epoch(0)]
    one = len(batches[0].ids_T) * 4 * tiny.HIDDEN * 4
    with opened(server, tmp_path / "run", ahead_gb=2.5 * one / 1e9) as open_source:
        source = source_of(open_source)
        for batch in batches:
            source.prefetch(batch)
        time.sleep(0.3)
        for batch in batches:
            source(batch)
            assert open_source._fetcher._held <= 2.5 * one
        assert open_source._fetcher._held == 0
    assert 0 < server.most_bytes <= 3 * one


def test_a_pack_that_is_waited_for_is_fetched_first(server: StatesServer, tmp_path: Path) -> None:
    """Held-out packs are requested after packs that fill the limit and are taken later."""
    ahead = [planned.build() for planned in packs_of(corpus_of(60)).epoch(0)]
    with opened(server, tmp_path / "run", ahead_gb=1e-9) as open_source:
        source = source_of(open_source)
        for batch in ahead:
            source.prefetch(batch)
        state = train_state_of(server.target)
        held_out = packs_of(corpus_of(8, seed=9)).epoch(0)
        assert estimate([state], held_out, source, depths=3) == estimate(
            [state], held_out, LiveSource(server.target, tiny.AUX_IDS), depths=3
        )


def test_files_of_an_earlier_run_are_removed_and_others_stay(server: StatesServer, tmp_path: Path) -> None:
    batch = a_batch()
    others = server.folder / "eyas-another-0-1.safetensors"
    save_file({"x": torch.zeros(3)}, others)
    with opened(server, tmp_path / "run") as open_source:
        prefix = open_source._fetcher._servers[0].client._files.prefix
    orphan = server.folder / f"{prefix}-dead-7.safetensors"
    save_file({"x": torch.zeros(3)}, orphan)
    with opened(server, tmp_path / "run") as open_source:
        assert not orphan.exists()
        source_of(open_source)(batch)
    assert list(server.folder.iterdir()) == [others]


def test_files_of_failed_requests_are_removed(server: StatesServer, tmp_path: Path) -> None:
    with opened(server, tmp_path / "run") as open_source:
        source_of(open_source)(a_batch())
        files = open_source._fetcher._servers[0].client._files
        early, late = (server.folder / f"{files.new_name()}.safetensors" for _ in range(2))
        save_file({"x": torch.zeros(3)}, early)
        files.discard(early.stem)
        assert not early.exists()
        files.discard(late.stem)
        save_file({"x": torch.zeros(3)}, late)
    assert not late.exists()


def test_a_stopping_run_does_not_wait_for_a_server(server: StatesServer, tmp_path: Path) -> None:
    asked = threading.Event()
    state = train_state_of(server.target)
    with opened(server, tmp_path / "run", stop=asked.is_set) as open_source:
        source = source_of(open_source)
        source(a_batch())
        server.stop()
        threading.Timer(0.5, asked.set).start()
        with pytest.raises(InterruptedWaitError):
            source.available(a_batch(1))
        outcome = train(
            [state],
            packs_of(corpus_of(60)),
            [],
            source,
            loop_config_of(tmp_path / "run"),
            observer=Diary(),
        )
    assert (outcome.step, outcome.finished) == (0, False)
    assert (tmp_path / "run" / "checkpoints" / "step-000000").is_dir()


WRONG = pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda server: setattr(server, "version", "0.33.1"),
            r"is vLLM 0\.33\.1, and states are served by 0\.32",
        ),
        (
            lambda server: setattr(server, "layer_ids", (1, 2, 4)),
            r"of the layers \[1, 2, 4\], and \[1, 2, 3, 4\]",
        ),
        (lambda server: setattr(server, "max_model_len", 100), r"takes 100 tokens.*--max-model-len 101"),
        (lambda server: setattr(server, "fault", lambda ids: "no file"), r"did not appear.*features\.states_folder"),
        (lambda server: setattr(server, "fault", lambda ids: "other ids"), r"16 other tokens than the 16"),
    ],
)


@WRONG
def test_the_wrong_server_is_refused_at_the_start(
    spoil: Callable[[StatesServer], None], words: str, server: StatesServer, tmp_path: Path
) -> None:
    spoil(server)
    with opened(server, tmp_path / "run") as open_source, pytest.raises(UserError, match=words):
        source_of(open_source)(a_batch())


@WRONG
def test_a_wrong_server_is_set_aside_and_the_right_one_waited_for(
    spoil: Callable[[StatesServer], None],
    words: str,
    server: StatesServer,
    tmp_path: Path,
    tiny_target: Target,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong, batch = StatesServer(tiny_target, server.folder, tiny.AUX_IDS).start(), a_batch()
    spoil(wrong)
    server.stop()
    with opened(server, tmp_path / "run", servers=[wrong.url, server.url]) as open_source:
        source = source_of(open_source)
        source.prefetch(batch)
        wait_until(lambda: any("set aside" in message for message in caplog.messages))
        server.start()
        assert source.available(batch) is batch
        source(batch)
        source(a_batch(1))
        assert open_source.record()["failed"] == 0
    wrong.stop()
    said = [message for message in caplog.messages if "one of 2 servers is set aside" in message]
    assert len(said) == 1
    assert wrong.url in said[0]
    assert re.search(words, said[0])
    assert all(len(ids) == 16 for ids in wrong.asked)


def test_a_run_ends_if_every_server_is_wrong_and_says_why(
    tiny_target: Target, server: StatesServer, tmp_path: Path
) -> None:
    other = StatesServer(tiny_target, server.folder, tiny.AUX_IDS, version="0.31.0").start()
    server.fault = lambda ids: "other ids"
    with opened(server, tmp_path / "run", servers=[server.url, other.url]) as open_source:
        with pytest.raises(UserError, match="none of the 2 servers can be used") as raised:
            source_of(open_source)(a_batch())
        assert re.search(rf"{server.url} does not hand out .*16 other tokens than the 16", str(raised.value))
        assert f"{other.url} is vLLM 0.31.0" in str(raised.value)
    other.stop()


@pytest.mark.parametrize("fault", ["other ids", "error", "no file", "status 400"])
def test_a_document_that_one_server_refuses_is_requested_from_another(
    fault: str, tiny_target: Target, server: StatesServer, tmp_path: Path
) -> None:
    other = StatesServer(tiny_target, server.folder, tiny.AUX_IDS).start()
    other.fault = lambda ids: None if len(ids) == 16 else fault
    with opened(server, tmp_path / "run", servers=[server.url, other.url]) as open_source:
        source = source_of(open_source)
        for seed in range(6):
            batch = a_batch(seed)
            assert source.available(batch) is batch
            source(batch)
        assert open_source.record()["failed"] == 0
    other.stop()


def test_the_api_key_of_vllm_is_sent(server: StatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with opened(server, tmp_path / "run") as open_source:
        source_of(open_source)(a_batch())
    assert server.keys == {"Bearer secret"}


def test_a_run_taken_up_again_has_the_losses_of_one_never_stopped(server: StatesServer, tmp_path: Path) -> None:
    def losses(output: Path, **options: Any) -> list[float]:
        diary = Diary()
        config = loop_config_of(output, length=RunLength(steps=8), log_every=1)
        with opened(server, output) as open_source:
            source = source_of(open_source)
            packs = packs_of(corpus_of(60))
            train([train_state_of(server.target)], packs, [], source, config, observer=diary, **options)
        return diary.losses()

    whole = losses(tmp_path / "whole")
    asked = iter([False, False, True])
    first = losses(tmp_path / "parts", stop=lambda: next(asked, True))
    assert len(first) == 3
    assert first + losses(tmp_path / "parts") == pytest.approx(whole, rel=1e-5)
    assert list(server.folder.iterdir()) == []


def test_requests_are_cancelled_at_the_end(
    server: StatesServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    with opened(server, tmp_path / "run") as open_source:
        source = source_of(open_source)
        source(a_batch())
        server.pause = 30.0
        source.prefetch(a_batch(1))
        time.sleep(0.5)
        began = time.monotonic()
        threads = list(open_source._fetcher._threads)
    assert time.monotonic() - began < 10
    assert not any(thread.is_alive() for thread in threads)
    assert not [message for message in caplog.messages if "waiting for" in message]
    assert not (set(threads) & before)


def test_a_server_of_another_model_of_the_same_shape_is_refused(
    server: StatesServer, tmp_path: Path, tiny_target: Target
) -> None:
    parts = TargetParts.of(tiny_target)
    other = replace(parts, head=replace(parts.head, weight_VD=parts.head.weight_VD.flip(0)))
    recipe = served_recipe(server, tmp_path / "run")
    with (
        open_served(recipe, other, tiny.AUX_IDS, ranks=Ranks()) as open_source,
        pytest.raises(UserError, match="it serves another model"),
    ):
        source_of(open_source)(a_batch())


def test_targets_that_attend_by_mla_are_refused_by_name(tiny_target: Target) -> None:
    config = PretrainedConfig(kv_lora_rank=512)
    with pytest.raises(UserError, match=r"tiny .*attends by MLA.*features\.source = \"live\""):
        require_servable(config, replace(tiny_target.facts, source="tiny"))


def test_a_cache_is_filled_by_servers_and_lists_failed_documents(
    server: StatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = corpus_of(120)
    lost = corpus.ids[24 * 5 : 24 * 6].tolist()
    server.fault = lambda ids: "status 400" if ids == lost else None
    recipe = recipe_of(
        tmp_path / "run",
        source="cache",
        folder=str(tmp_path / "cache"),
        top_k=80,
        servers=[server.url],
        states_folder=str(server.folder),
    )
    diary = losses_of(recipe, server.target, monkeypatch)
    assert len(diary.losses()) == 40
    index = json.loads((tmp_path / "cache" / "index.json").read_text())
    assert len(index["failed"]) == 1
    _, live = trained(monkeypatch, server.target, recipe_of(tmp_path / "live", source="live"))
    assert diary.losses()[-1] == pytest.approx(live.losses()[-1], rel=0.05)
    # A resumed run with a complete cache needs no server.
    asked = len(server.asked)
    losses_of(recipe, server.target, monkeypatch, resuming=True)
    assert not [ids for ids in server.asked[asked:] if len(ids) == 24]


def test_the_command_captures_the_layers_read_and_the_last_one() -> None:
    command = Command(
        model="m", layer_ids=(2, 15, 27), num_hidden_layers=30, folder=Path("/s"), max_length=512, python="/v/python"
    )
    words = command.command(["--enforce-eager"])
    assert words[:4] == ["/v/python", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert words[-1] == "--enforce-eager"
    said = json.loads(words[words.index("--speculative-config") + 1])
    assert said["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27, 30]
    assert words[words.index("--max-model-len") + 1] == "513"
    assert captured_layers((2, 30), 30) == (2, 30)
    assert command.line().startswith("PYTHONPATH=")


def test_the_connector_is_alone_in_its_folder() -> None:
    command = Command(model="m", layer_ids=(1,), num_hidden_layers=2, folder=Path("/s"), max_length=9)
    folder = Path(command.environment()["PYTHONPATH"])
    assert {path.name for path in folder.glob("*.py")} == {"__init__.py", "eyas_states.py"}
    assert "import eyas" not in (folder / "eyas_states.py").read_text()
    assert "from eyas" not in (folder / "eyas_states.py").read_text()
