"""Runs the target: fused code where it is the block of `kernels/llama/`, and transformers' own code where it is not.

`run` takes a pass whose layout may lie on the device, as rounds have it (`round_passes.py`); `run_rows` what the
scheduler has chosen, laid out by the host.

Shapes: N tokens of a pass, M logits asked for, V vocabulary, X concatenated auxiliary states.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.fused_target import fused_target
from eyas.engine.runner.target import TargetRunner
from eyas.engine.sampler import TokenLogprobs, log_probabilities
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.draft import NO_DRAFT, Draft
from eyas.engine.verify import TargetOutput, lay_out
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.metadata import AttentionMetadata, integers
from eyas.target.capture import capture, select_states
from eyas.target.model import Target

LOGITS_AT_ONCE = 64
"""Rows of prompt logits that are reduced together, which bounds the memory of the reduction."""

FEW_LOGITS = 16
"""Rows of logits up to which their memory is kept from pass to pass."""


class ModelRunner:
    """A target over its KV cache."""

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.cache = cache
        self.layer_ids: tuple[int, ...] = ()
        """Whose states the drafter reads; those are kept of every pass that it follows."""
        self.kept_layer_ids: tuple[int, ...] = ()
        """Whose states every pass over rows gives besides, for whoever asked for them."""
        self._target, self.device = target, target.device
        self._own = TargetRunner(target, cache)
        self._fused = fused_target(target)
        self._logits_MV = torch.empty(0)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of a pass; a model's own code may compute logits more finely than the rest."""
        return self._target.dtype if self._fused is not None else torch.float32

    def run_rows(self, rows: Sequence[ScheduledRow], drafts: Mapping[int, Draft], *, states: bool) -> TargetOutput:
        """Run one pass: logits behind every token that chooses and, if asked for, the states of all tokens."""
        layer_ids = self.layer_ids if states else ()
        ids: list[int] = []
        keep: list[int] = []
        of_prompts: list[int] = []
        shares = []
        for row in rows:
            draft = drafts.get(row.seq.key, NO_DRAFT)
            newest = len(ids) + row.count - 1
            of_prompts += range(len(ids), len(ids) + row.prompt_logits)
            ids += [*row.seq.tokens[row.start : row.start + row.count], *draft.tokens]
            keep += range(newest, len(ids)) if row.samples else ()
            shares.append(lay_out(row, draft))
        metadata = AttentionMetadata.of(shares, block_size=self.cache.block_size, device=self.device)
        both = tuple(sorted({*layer_ids, *self.kept_layer_ids}))
        asked = len(keep) + len(of_prompts)
        keep_M = None if keep == list(range(len(ids))) else integers(keep + of_prompts, self.device)
        logits_MV, states_NX = self.run(integers(ids, self.device), metadata, keep_M, both, self._memory_for(asked))
        prompt_logprobs = _prompt_logprobs(rows, logits_MV[len(keep) :]) if of_prompts else {}
        if of_prompts:
            logits_MV = logits_MV[: len(keep)].clone()  # those of prompts are many, and free memory from here on
        aux_NX, hidden_NX = (
            select_states(states_NX, both, some) if some and states_NX is not None else None
            for some in (layer_ids, self.kept_layer_ids)
        )
        return TargetOutput(logits_MV=logits_MV, aux_NX=aux_NX, hidden_NX=hidden_NX, prompt_logprobs=prompt_logprobs)

    def _memory_for(self, logits: int) -> Tensor | None:
        """Where the logits of a pass over rows go, until the next: on a CPU fresh pages cost a short pass much."""
        if self._fused is None or self.device.type != "cpu" or not 0 < logits <= FEW_LOGITS:
            return None
        if len(self._logits_MV) < logits:
            shape = (logits, self._target.facts.vocab_size)
            self._logits_MV = torch.empty(shape, dtype=self.logits_dtype, device=self.device)
        return self._logits_MV[:logits]

    def run(
        self,
        ids_N: Tensor,
        metadata: AttentionMetadata,
        keep_M: Tensor | None,
        layer_ids: Sequence[int],
        logits_out_MV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits behind the tokens `keep_M`, or all, and the states of these layers, if any.

        Logits are `logits_out_MV` where there is a fused pass; a model's own code has memory of its own.
        """
        if self._fused is not None:
            attention = choose_backend(metadata)
            return self._fused.forward(ids_N, attention, self.cache.layers, keep_M, layer_ids, logits_out_MV)
        if not layer_ids:
            return self._own.forward(ids_N, metadata, keep_M), None
        with capture(self._target.model, layer_ids) as captured:
            logits_MV = self._own.forward(ids_N, metadata, keep_M)
        return logits_MV, captured.aux_hidden()[0]


def _prompt_logprobs(rows: Sequence[ScheduledRow], logits_MV: Tensor) -> dict[int, list[TokenLogprobs]]:
    """Logprobs of the prompt tokens behind those that rows read, by the keys of their requests."""
    told: dict[int, list[TokenLogprobs]] = {}
    first = 0
    for row in rows:
        count, seq = row.prompt_logits, row.seq
        if not count:
            continue
        assert row.start == len(seq.prompt_logprobs), "a prompt is read in order, from its beginning"
        token_M = integers(seq.tokens[row.start + 1 : row.start + 1 + count], logits_MV.device)
        told[seq.key] = [
            entry
            for at in range(0, count, LOGITS_AT_ONCE)
            for entry in log_probabilities(
                logits_MV[first + at : first + min(count, at + LOGITS_AT_ONCE)],
                token_M[at : at + LOGITS_AT_ONCE],
                seq.request.prompt_logprobs or 0,
            )
        ]
        first += count
    return told
