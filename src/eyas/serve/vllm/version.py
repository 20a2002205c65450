"""Which vLLM an interpreter has. What eyas and vLLM say to each other differs between its versions: one is spoken."""

import subprocess

from eyas.errors import UserError

SEAM = "0.32"
"""The version whose `/inference/v1/generate`, metrics and options `serve/vllm` was written for and tried with."""

CPU_BUILD = "+cpu"
"""In the version of a build for processors."""


def installed(python: str) -> str:
    """The version of vLLM that an interpreter has; one without it is refused."""
    # From its metadata: to import it takes half a minute.
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
    """The interpreter and its version of vLLM, if it is one that eyas speaks with."""
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
