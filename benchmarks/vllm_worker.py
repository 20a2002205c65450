"""Worker process with vLLM that answers batches of prompts and reports their times.

Needs vllm and nothing of eyas. `vllm_process.py` starts it and speaks with it, in lines of JSON: first the options of
the engine, then one line for every batch, each answered by one line. What vLLM itself prints goes to stderr.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    """Serve until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, and lines between replies would not be JSON
    started = time.perf_counter()
    from vllm import LLM, __version__

    llm = LLM(**json.loads(sys.stdin.readline()))
    print(json.dumps({"version": __version__, "seconds": time.perf_counter() - started}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llm, **json.loads(line))), file=replies, flush=True)


def answer(llm: Any, *, prompts: list[list[int]], users: int, max_tokens: int, stop_ids: list[int]) -> dict[str, Any]:
    """Answer prompts greedily; without stop ids every answer has `max_tokens`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=not stop_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine, tokens, gaps = llm.llm_engine, 0, []
    waiting = iter(enumerate(prompts))
    started = last = time.perf_counter()

    def add(count: int) -> None:
        for _, (number, prompt) in zip(range(count), waiting, strict=False):
            engine.add_request(f"{started}-{number}", {"prompt_token_ids": prompt}, params)

    add(users)
    while engine.has_unfinished_requests():
        ended = [output for output in engine.step() if output.finished]
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        tokens += sum(len(output.outputs[0].token_ids) for output in ended)
        add(len(ended))
    return {
        "tokens": tokens,
        "seconds": last - started,
        "steps": len(gaps),
        "ms_per_step": 1000 * statistics.median(gaps),
    }


if __name__ == "__main__":
    main()
