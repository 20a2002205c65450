"""Runs vLLM from another interpreter as a child process."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas.errors import UserError
from eyas.serve.vllm import version

WORKER = Path(__file__).parent / "vllm_worker.py"


def installed(python: str | None) -> str | None:
    """The version of vLLM in an interpreter; None without an interpreter; raises if vLLM is missing."""
    return None if python is None else version.installed(python)


def vllm_options(
    model: Path | str,
    *,
    users: Sequence[int],
    max_model_len: int,
    memory_share: float,
    dtype: str,
    random_weights: bool = False,
    drafter: Path | str | None = None,
    depth: int = 0,
    length: float | None = None,
    eager: bool = False,
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; `length` forces this mean acceptance length."""
    options: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len,
        "max_num_seqs": max(users),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": memory_share,  # on a CPU, of the machine's memory
        # By default graphs end at 512 tokens, which three drafts for 256 users exceed: capture what is measured.
        "compilation_config": {"cudagraph_capture_sizes": capture_sizes(users, depth)},
    }
    if eager:
        del options["compilation_config"]
        options["enforce_eager"] = True
    if kv_cache_dtype != "auto":
        options["kv_cache_dtype"] = kv_cache_dtype
    if random_weights:
        options["load_format"] = "dummy"
    if depth:
        options["speculative_config"] = {"model": str(drafter), "method": "eagle3", "num_speculative_tokens": depth}
        if length is not None:
            options["speculative_config"] |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": length,
            }
    return options


def capture_sizes(users: Sequence[int], depth: int) -> list[int]:
    """CUDA graph sizes for the measured steps, and for fewer requests."""
    most = max(users) * (1 + depth)
    sizes = {count * (1 + depth) for count in users} | {1, 2, 4, 8}
    sizes |= {2**power * (1 + depth) for power in range(10)}
    return sorted(size for size in sizes if size <= max(most, 8))


class VLLMProcess:
    """A vLLM engine, as a context manager."""

    def __init__(self, python: str, options: Mapping[str, Any], log: Path) -> None:
        self._python, self._options, self._log = python, options, log
        self.version, self.start_seconds = "", 0.0

    def __enter__(self) -> "VLLMProcess":
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._python, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            ready = self._ask(self._options)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.version, self.start_seconds = ready["version"], ready["seconds"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.close()
            process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def answer(
        self, prompts: Sequence[Sequence[int]], *, users: int, max_tokens: int, stop_ids: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Answer prompts, at most `users` at a time: `tokens`, `seconds`, `steps`, `ms_per_step`."""
        given = [list(prompt) for prompt in prompts]
        return self._ask({"prompts": given, "users": users, "max_tokens": max_tokens, "stop_ids": list(stop_ids)})

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(message), file=process.stdin, flush=True)
        except BrokenPipeError:
            line = ""
        else:
            line = process.stdout.readline()
        if not line:
            raise UserError(f"vLLM ended: {self._reason()}; all it said is in {self._log}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _reason(self) -> str:
        """The first error in the log; later ones follow from it."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\bERROR\b.*Error: ", line)]
        return re.sub(r"^.*?\] ", "", errors[0] if errors else lines[-1] if lines else "it said nothing")[:300]
