"""KV connector for vLLM that writes a request's hidden states to a file named by the client.

    {"kv_transfer_params": {"eyas_file": NAME}}   in a request, asks for  FOLDER/NAME.safetensors
    hidden_states [T, A, D], token_ids [T]        its tensors; its metadata names layers, model and version
    FOLDER/NAME.error                             instead, if it could not be written: the reason

A file is written under another name and renamed, so it appears whole. Requests without that parameter leave no file.
Files that are not fetched within `max_age_seconds` are removed, and beyond `max_bytes` no file is added.

This file runs in vLLM's own interpreter and imports nothing of eyas: its folder is put on PYTHONPATH, or it is copied.
It builds on vLLM's `ExampleHiddenStatesConnector`, which differs between versions, so it requires one series.

Shapes: T tokens, A captured layers, D hidden size.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors.torch import save
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

logger = init_logger(__name__)

VLLM_SERIES = "0.32."
MAX_AGE_SECONDS = 3600.0
MAX_BYTES = 64 * 10**9
SWEEP_SECONDS = 60.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,120}")
_SUFFIXES = (".safetensors", ".error", ".part")


class _Copied:
    """Completed copy, for devices without streams."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class EyasStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes states to files for requests that ask for them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if not vllm.__version__.startswith(VLLM_SERIES):
            raise ValueError(
                f"this connector is for vLLM {VLLM_SERIES}x and this is {vllm.__version__}, whose connectors differ; "
                f"install vLLM {VLLM_SERIES}0"
            )
        if vllm_config.model_config.use_mla:
            raise ValueError(
                f"{vllm_config.model_config.model} attends by MLA, whose verifiers vLLM's hidden-state connector does "
                "not support: the states cannot have a KV cache group of their own"
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                "pipeline parallelism puts the captured layers into several processes, and one writes the file; use "
                "tensor parallelism"
            )
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError(
                "a cached prefix is not computed again and leaves no states; pass --no-enable-prefix-caching"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self.use_lock = False  # files appear whole
        self._folder = Path(self._storage_path)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._max_age = float(extra("max_age_seconds", MAX_AGE_SECONDS))
        self._max_bytes = int(extra("max_bytes", MAX_BYTES))
        self._swept = 0.0
        self._reserved = 0
        self._guard = threading.Lock()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        self._metadata = {
            "layer_ids": json.dumps(sorted(config.eagle_aux_hidden_state_layer_ids)),
            "model": str(vllm_config.model_config.model),
            "vllm": vllm.__version__,
        }
        self._sweep()

    # Scheduler's side

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            sampling = request.sampling_params
            asked = ((sampling.extra_args if sampling else None) or {}).get("kv_transfer_params") or {}
            name = asked.get("eyas_file")
            if isinstance(name, str) and _NAME.fullmatch(name):
                self._request_filenames[request.req_id] = str(self._folder / f"{name}.safetensors")
            else:
                del self._request_filenames[request.req_id]
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.status == RequestStatus.FINISHED_ABORTED:  # the client is gone, and the states may be incomplete
            self._request_filenames.pop(request.request_id, None)
        delays, answer = super().request_finished(request, block_ids)
        return delays, None if answer is None else {"eyas_file": Path(answer["hidden_states_path"]).stem}

    # Worker's side

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks_B = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None] + blocks_B[:, None] * self._block_size).flatten()
        tokens = len(pending.token_ids)
        done: Any = _Copied()
        if self._kv_cache.is_cuda:
            stream = self._get_copy_stream()
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record()
            stream.wait_event(computed)
            with torch.cuda.stream(stream):
                states_TAD = extract_from_kv_cache(self._kv_cache, slots.to(self._kv_cache.device), tokens)
                host_TAD = torch.empty_like(states_TAD, device="cpu", pin_memory=True)
                host_TAD.copy_(states_TAD, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        else:
            host_TAD = extract_from_kv_cache(self._kv_cache, slots, tokens).clone()
        tensors = {"hidden_states": host_TAD.contiguous(), "token_ids": pending.token_ids.clone()}
        self._req_copy_events[pending.req_id] = done
        future: Future[None] = self._executor.submit(self._write, tensors, done, Path(pending.filename))
        future.add_done_callback(lambda ended: self._on_write_done(pending.req_id, ended))

    def _write(self, tensors: dict[str, torch.Tensor], done: Any, path: Path) -> None:
        part = path.with_suffix(".part")
        try:
            done.synchronize()
            data = save(tensors, metadata=self._metadata)
            with self._room_for(len(data)):
                part.write_bytes(data)
                part.replace(path)
        except Exception as error:
            part.unlink(missing_ok=True)
            path.with_suffix(".error").write_text(f"{type(error).__name__}: {error}"[:500])
            raise

    @contextmanager
    def _room_for(self, needed: int) -> Iterator[None]:
        """Reserve room for a file while it is written; raise if there is none."""
        with self._guard:
            if time.time() - self._swept > SWEEP_SECONDS or self._taken() + needed > self._max_bytes:
                self._sweep()
            if (taken := self._taken()) + needed > self._max_bytes:
                raise OSError(
                    f"{self._folder} holds {taken:,} bytes of states and {needed:,} more exceed max_bytes "
                    f"{self._max_bytes:,}"
                )
            self._reserved += needed
        try:
            yield
        finally:
            with self._guard:
                self._reserved -= needed

    def _taken(self) -> int:
        """Bytes of existing files and of those being written."""
        return self._reserved + sum(size for path, size, _ in self._files() if path.suffix != ".part")

    def _sweep(self) -> None:
        """Remove old files that were not fetched."""
        self._swept = time.time()
        for path, _, changed in self._files():
            if self._swept - changed > self._max_age:
                path.unlink(missing_ok=True)

    def _files(self) -> list[tuple[Path, int, float]]:
        found = []
        for path in self._folder.iterdir():
            if path.suffix in _SUFFIXES:
                try:
                    stat = path.stat()
                except FileNotFoundError:  # a client has removed it meanwhile
                    continue
                found.append((path, stat.st_size, stat.st_mtime))
        return found
