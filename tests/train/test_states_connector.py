"""Connector for vLLM, tested without vLLM: names, files, bounds, removal of old files, refusals.

tests/parity/test_served_states.py tests it inside the real vLLM.
"""

import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from eyas.train.served.command import VLLM_SERIES, VLLM_SIDE

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


class Example:
    """The part of vLLM's connector that ours builds on."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_transfer_config = SimpleNamespace(get_from_extra_config=vllm_config.extra.get)
        self._storage_path = vllm_config.extra["shared_storage_path"]
        self._request_filenames: dict[str, str] = {}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            self._request_filenames[request.req_id] = f"{self._storage_path}/{request.req_id}.safetensors"
        return SimpleNamespace()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        name = self._request_filenames.pop(request.request_id, None)
        return (False, None) if name is None else (True, {"hidden_states_path": name})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    def fake(name: str, **values: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, made)

    for package in ("vllm.distributed", "vllm.distributed.kv_transfer", "vllm.v1"):
        fake(package)
    for package in ("vllm.distributed.kv_transfer.kv_connector", "vllm.distributed.kv_transfer.kv_connector.v1"):
        fake(package)
    fake("vllm", __version__=f"{VLLM_SERIES}0+cpu")
    fake(BASE, ExampleHiddenStatesConnector=Example, extract_from_kv_cache=None)
    fake("vllm.logger", init_logger=lambda _: None)
    fake("vllm.v1.request", RequestStatus=SimpleNamespace(FINISHED_ABORTED="aborted"))
    spec = importlib.util.spec_from_file_location("eyas_states", VLLM_SIDE / "eyas_states.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def config(folder: Path, **extra: Any) -> SimpleNamespace:
    hidden = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[2, 4])
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False, model="it"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hidden)),
        extra={"shared_storage_path": str(folder), **extra},
    )


def tensors(tokens: int = 4) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.ones(tokens, 2, 8), "token_ids": torch.arange(tokens)}


def asked(name: object, request: str = "r1") -> SimpleNamespace:
    extra = {"kv_transfer_params": {"eyas_file": name}}
    return SimpleNamespace(req_id=request, sampling_params=SimpleNamespace(extra_args=extra))


def test_only_requests_with_a_valid_name_get_a_file(module: Any, tmp_path: Path) -> None:
    connector = module.EyasStatesConnector(config(tmp_path), None, None)
    without = SimpleNamespace(req_id="r2", sampling_params=SimpleNamespace(extra_args=None))
    new = [asked("mine-1"), without, asked("../escape", "r3"), asked(7, "r4")]
    connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=new))
    assert connector._request_filenames == {"r1": str(tmp_path / "mine-1.safetensors")}
    done = SimpleNamespace(request_id="r1", status="stopped")
    assert connector.request_finished(done, []) == (True, {"eyas_file": "mine-1"})
    assert connector.request_finished(SimpleNamespace(request_id="r3", status="stopped"), []) == (False, None)


def test_an_aborted_request_leaves_no_file(module: Any, tmp_path: Path) -> None:
    connector = module.EyasStatesConnector(config(tmp_path), None, None)
    connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[asked("mine-1")]))
    assert connector.request_finished(SimpleNamespace(request_id="r1", status="aborted"), []) == (False, None)


def test_a_file_appears_whole_with_metadata(module: Any, tmp_path: Path) -> None:
    connector = module.EyasStatesConnector(config(tmp_path), None, None)
    connector._write(tensors(), module._Copied(), tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["layer_ids"]) == [2, 4]
        assert file.get_tensor("token_ids").tolist() == [0, 1, 2, 3]


def test_a_failed_write_leaves_an_error_file(module: Any, tmp_path: Path) -> None:
    connector = module.EyasStatesConnector(config(tmp_path, max_bytes=1000), None, None)
    connector._write(tensors(), module._Copied(), tmp_path / "a.safetensors")
    with pytest.raises(OSError, match="more exceed max_bytes 1,000"):
        connector._write(tensors(), module._Copied(), tmp_path / "b.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.error"]
    assert "max_bytes 1,000" in (tmp_path / "b.error").read_text()


def test_concurrent_writes_stay_within_max_bytes(module: Any, tmp_path: Path) -> None:
    connector = module.EyasStatesConnector(config(tmp_path, max_bytes=2000), None, None)
    copied = SimpleNamespace(synchronize=threading.Barrier(8).wait)

    def write(number: int) -> None:
        try:
            connector._write(tensors(), copied, tmp_path / f"{number}.safetensors")
        except OSError:
            return

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert 0 < sum(written) <= 2000
    assert len(written) + len(list(tmp_path.glob("*.error"))) == 8


def test_old_files_are_removed_at_the_start_and_when_room_is_needed(module: Any, tmp_path: Path) -> None:
    def old(name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(bytes(900))
        os.utime(path, (time.time() - 7200,) * 2)
        return path

    orphan, others = old("x-1.safetensors"), old("notes.txt")
    connector = module.EyasStatesConnector(config(tmp_path, max_bytes=1000), None, None)
    assert not orphan.exists()
    late = old("x-2.safetensors")
    connector._write(tensors(), module._Copied(), tmp_path / "a.safetensors")
    assert not late.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "notes.txt"]
    assert others.exists()


@pytest.mark.parametrize(
    ("table", "key", "value", "words"),
    [
        ("model_config", "use_mla", True, "attends by MLA"),
        ("parallel_config", "pipeline_parallel_size", 2, "use tensor parallelism"),
        ("cache_config", "enable_prefix_caching", True, "--no-enable-prefix-caching"),
    ],
)
def test_unsupported_configurations_are_refused(
    module: Any, tmp_path: Path, table: str, key: str, value: object, words: str
) -> None:
    wrong = config(tmp_path)
    setattr(getattr(wrong, table), key, value)
    with pytest.raises(ValueError, match=words):
        module.EyasStatesConnector(wrong, None, None)


def test_another_vllm_is_refused_by_name(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.vllm, "__version__", "0.33.0")
    with pytest.raises(ValueError, match=r"this is 0\.33\.0.*install vLLM 0\.32\.0"):
        module.EyasStatesConnector(config(tmp_path), None, None)


def test_both_sides_require_the_same_vllm(module: Any) -> None:
    assert module.VLLM_SERIES == VLLM_SERIES
