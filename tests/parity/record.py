"""Run the real vLLM over prompts and write down every proposal its drafter makes.

    python record.py JOB.json

The job names target, drafter, depth, new tokens and prompts (token ids); the record lies beside it: JOB.record.json
with outputs, proposals and vLLM's own acceptance counters, JOB.record.safetensors with the auxiliary states vLLM fed
to its drafter. vLLM runs in this process, so `propose` can be wrapped; each job has a process of its own, so no state
of one engine reaches the next.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer


class ProposalLog:
    """What went into each call of `propose` and what came out, for one sequence at a time."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.aux: list[torch.Tensor] = []

    def install(self) -> None:
        """Wrap vLLM's proposer."""
        original = SpecDecodeBaseProposer.propose

        def propose(proposer: SpecDecodeBaseProposer, *args: Any, **kwargs: Any) -> torch.Tensor:
            given = dict(zip(original.__code__.co_varnames[1:], args, strict=False)) | kwargs
            # With rejected tokens in the batch, the last verified slot is named; without, it is the last one.
            last = given["token_indices_to_sample"]
            slots = len(given["target_token_ids"]) if last is None else int(last[0]) + 1
            entry = {
                "positions": given["target_positions"][:slots].tolist(),
                "tokens": given["target_token_ids"][:slots].tolist(),
                "next": int(given["next_token_ids"][0]),
            }
            self.aux.append(given["target_hidden_states"][:slots].clone())
            drafts = original(proposer, *args, **kwargs)
            self.entries.append(entry | {"drafts": drafts[0].tolist()})
            return drafts

        SpecDecodeBaseProposer.propose = propose

    def take(self) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """The log since the last call, with the states of all verified slots in order of position."""
        entries, aux = self.entries, self.aux
        self.entries, self.aux = [], []
        states: dict[int, torch.Tensor] = {}
        for entry, rows in zip(entries, aux, strict=True):
            states |= dict(zip(entry["positions"], rows, strict=True))
        return entries, torch.stack([states[position] for position in sorted(states)])


def main(job_path: Path) -> None:
    """Run one job."""
    job = json.loads(job_path.read_text())
    log = ProposalLog()
    log.install()
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=job["max_model_len"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        # Its kernel for CPUs turns heads wrongly where neighbours are pairs, and two heads or views of heads are given:
        # so it does for latent attention. The same in torch's own operations is right.
        compilation_config={"custom_ops": ["-rotary_embedding"]} if job["latent"] else {},
        # On processors with AMX, vLLM's default backend for latent attention refuses float32, in target and drafter.
        attention_backend="CPU_MLA" if job["latent"] else None,
        speculative_config={
            "model": job["drafter"],
            "method": job["method"],
            "num_speculative_tokens": job["depth"],
            "attention_backend": "CPU_MLA" if job["latent"] else None,
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    outputs, proposals, aux = [], [], {}
    for index, prompt in enumerate(job["prompts"]):
        log.take() if log.entries else None
        result = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        outputs.append(list(result[0].outputs[0].token_ids))
        entries, states = log.take()
        proposals.append(entries)
        aux[f"aux.{index}"] = states
    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            counters[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "values", None) or metric.value
    record = {"outputs": outputs, "proposals": proposals, "counters": counters}
    job_path.with_suffix(".record.json").write_text(json.dumps(record))
    save_file(aux, job_path.with_suffix(".record.safetensors"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
