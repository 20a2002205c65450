"""Finds and checks an interpreter's version of vLLM. Its internal API changes between versions; one is supported."""

import subprocess

from eyas.errors import UserError

SEAM = "0.32"
"""The supported version: `serve/vllm` was tested with its `/inference/v1/generate`, metrics and options."""

CPU_BUILD = "+cpu"
"""The suffix of a version built for CPUs."""


def installed(python: str) -> str:
    """The version of vLLM in an interpreter, or an error if it has none."""
    # From its metadata, since importing it takes half a minute.
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--vllm-python {python} cannot be run ({error}); give an interpreter that has vLLM") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"--vllm-python {python} has no vLLM ({reason}); install vllm {SEAM} there")
    return done.stdout.strip()


def require_version(python: str | None) -> tuple[str, str]:
    """The interpreter and its version of vLLM, if eyas supports that version."""
    if python is None:
        raise UserError(
            "--engine vllm needs --vllm-python, an interpreter that has vLLM: its pins and those of eyas conflict, so "
            f"install vllm {SEAM} into an environment of its own"
        )
    version = installed(python)
    if version.split(".")[:2] != SEAM.split("."):
        raise UserError(
            f"--vllm-python {python} has vLLM {version}, and eyas speaks with {SEAM}: requests, metrics and options "
            f"differ between versions; install vllm {SEAM} there"
        )
    return python, version
