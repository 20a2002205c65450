"""States that the real vLLM hands out are ours: the same loss and gradients on the default target, whatever befalls it.

Run by `make parity`, or in any environment with EYAS_VLLM_PYTHON set to the interpreter that vLLM 0.32 is installed in.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from default_drafter import training_prompts
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.batch import CorpusPacks
from eyas.train.corpus.corpus import Corpus
from eyas.train.features import Features, FetchingSource
from eyas.train.init import config_for, init_drafter
from eyas.train.loop import LoopConfig, train
from eyas.train.ranks import Ranks
from eyas.train.recipe import DrafterSettings, Recipe, TrainSettings
from eyas.train.recipe_file import read_recipe
from eyas.train.schedule import LearningRateSchedule, RunLength
from eyas.train.served.open import open_served
from eyas.train.sources.live import LiveSource
from eyas.train.state import TrainState
from train.test_loop import Diary

PYTHON = os.environ.get("EYAS_VLLM_PYTHON") or (sys.executable if find_spec("vllm") else None)
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(PYTHON is None, reason="needs the real vLLM: set EYAS_VLLM_PYTHON, or run `make parity`"),
]
LAYERS, PORT = (2, 15, 27), 8732
LENGTH = 96


class Vllm:
    """A server that `eyas features serve` starts, and that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{PORT}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PYTHON is not None
        variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "eyas", "features", "serve", "smollm2", "--vllm-python", PYTHON]
        command += ["--aux-layer-ids", ",".join(map(str, LAYERS)), "--states-folder", str(self.folder)]
        command += ["--max-length", str(LENGTH), "--dtype", "float32", "--port", str(PORT)]
        with (self.folder.parent / "vllm.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--", "--enforce-eager", "--max-num-seqs", "4"],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (self.folder.parent / "vllm.log").read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
            except OSError:
                time.sleep(1)
            else:
                return
        raise AssertionError("vLLM did not start within 15 minutes")

    def kill(self) -> None:
        """At once, with all of its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    server = Vllm(tmp_path_factory.mktemp("vllm") / "states")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2", dtype="float32")


def packs(target: Target, documents: int = 12) -> CorpusPacks:
    """Real text; what stands behind a document's tenth token is taught."""
    texts = training_prompts()
    joined = [" ".join(texts[(i + k) % len(texts)] for k in range(9)) for i in range(documents)]
    ids = [target.encode_chat([{"role": "user", "content": text}])[:LENGTH] for text in joined]
    lengths = [len(row) for row in ids]
    corpus = Corpus(
        ids=np.concatenate([np.array(row, dtype=np.int32) for row in ids]),
        mask=np.concatenate([np.arange(length) >= 10 for length in lengths]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
    )
    return CorpusPacks(corpus=corpus, length=2 * LENGTH, seed=0, device=torch.device("cpu"), padded=False)


def recipe_of(vllm: Vllm, output: Path) -> Recipe:
    return read_recipe(
        {
            "data": {"files": ["none.jsonl"], "max_length": LENGTH, "pack_length": 2 * LENGTH},
            "target": {"dtype": "float32"},
            "features": {
                "source": "served",
                "servers": [vllm.url],
                "states_folder": str(vllm.folder),
                "in_flight": 4,
            },
            "output": {"folder": str(output)},
        }
    )


def state_of(parts: TargetParts) -> TrainState:
    settings = DrafterSettings(aux_layer_ids=LAYERS, draft_vocab_size=2048)
    drafter = init_drafter(parts, config_for(parts, settings, dtype="float32"), torch.arange(2048), seed=0)
    return TrainState("drafter", drafter, TrainSettings(depths=3, lr=1e-3))


def learnt(state: TrainState, batch: Any, features: Features) -> tuple[float, list[torch.Tensor]]:
    state.zero_grad()
    state.backward(batch, features, batch.counts(3))
    return float(state.metrics_3S[0].sum()), [gradient.clone() for gradient in state.gradients()]


def test_served_and_live_states_give_the_same_loss_and_gradients(vllm: Vllm, target: Target, tmp_path: Path) -> None:
    parts = TargetParts.load("smollm2", dtype="float32")
    batches = [planned.build() for planned in packs(target).epoch(0)]
    live, state = LiveSource(target, LAYERS), state_of(parts)
    assert torch.equal(state_of(TargetParts.of(target)).drafter.fc.weight, state.drafter.fc.weight)
    with open_served(recipe_of(vllm, tmp_path), parts, LAYERS, ranks=Ranks()) as open_source:
        source = open_source(LAYERS, compiled=False)
        assert isinstance(source, FetchingSource)
        for batch in batches:
            assert source.available(batch) is batch
            features, expected = source(batch), live(batch)
            aux = float((features.aux_TX - expected.aux_TX).norm() / expected.aux_TX.norm())
            ours, our_gradients = learnt(state, batch, features)
            theirs, their_gradients = learnt(state, batch, expected)
            errors = [
                float((a - b).norm() / b.norm().clamp(min=1e-12))
                for a, b in zip(our_gradients, their_gradients, strict=True)
            ]
            print(f"states {aux:.1e}  loss {ours:.4f} {theirs:.4f}  gradients {max(errors):.1e}")
            assert aux < 1e-5
            assert ours == pytest.approx(theirs, rel=1e-5)
            assert max(errors) < 1e-3
        assert open_source.record()["failed"] == 0
    assert list(vllm.folder.iterdir()) == []


def test_vllm_killed_and_started_again_costs_time_and_nothing_else(vllm: Vllm, target: Target, tmp_path: Path) -> None:
    parts, planned = TargetParts.of(target), packs(target)

    def losses(source: Any, folder: Path, **options: Any) -> list[float]:
        diary = Diary()
        config = LoopConfig(
            length=RunLength(steps=12),
            packs_per_step=1,
            schedule=LearningRateSchedule(name="cosine", warmup=0.1, decay=0.2, final=0.1),
            compiled=False,
            log_every=1,
            eval_every=0,
            save_every=0,
            folder=folder,
            same={},
        )
        train([state_of(parts)], planned, [], source, config, observer=diary, **options)
        return diary.losses()

    def kill_and_restart() -> None:
        vllm.kill()
        vllm.start()

    expected = losses(LiveSource(target, LAYERS), tmp_path / "live")
    with open_served(recipe_of(vllm, tmp_path), parts, LAYERS, ranks=Ranks()) as open_source:
        restart = threading.Thread(target=kill_and_restart)
        found = losses(open_source(LAYERS, compiled=False), tmp_path / "served", on_first_step=restart.start)
        restart.join()
        record = open_source.record()
    print(f"losses {found[0]:.4f} .. {found[-1]:.4f}, live {expected[0]:.4f} .. {expected[-1]:.4f}; {record}")
    assert found == pytest.approx(expected, rel=1e-4)
    assert record["failed"] == 0
    assert list(vllm.folder.iterdir()) == []
