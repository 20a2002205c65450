"""Steps in which the host takes part, one after the other: those of a CPU, and of a GPU where rounds cannot be used.

    schedule  which requests take part, with how many tokens, and how deep each is drafted for
    verify    the drafter proposes tokens, and the target reads all rows in a pass: chunks of prompts, newest tokens,
              drafts; its own token at every position, and drafts that equal it are accepted
    commit    tokens, blocks, stop conditions; ended requests leave. Text follows (`engine.py`)

`round_loop.py` does the same where rounds live on a device.

Shapes: M logits asked for, V vocabulary, T tokens, X concatenated states.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eyas.engine.kv_cache.hidden_states import HiddenStateCache
from eyas.engine.output import OutputProcessor
from eyas.engine.proposer import Proposes
from eyas.engine.request import SequenceState
from eyas.engine.runner.model_runner import ModelRunner
from eyas.engine.sampler import TokenLogprobs, log_probabilities
from eyas.engine.scheduler import ScheduledRow, Scheduler, SchedulerOutput
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.observations import TargetTiming
from eyas.engine.speculation.step_report import StepReport
from eyas.engine.verify import TargetOutput, VerifyResult, ranks_of, states_of, verify


class HostLoop:
    """The steps of an engine without rounds; with them, what reads prompts whose logprobs are asked for."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        proposer: Proposes,
        controller: Controller,
        outputs: OutputProcessor,
        *,
        hidden: HiddenStateCache | None,
        clock: Callable[[], float],
    ) -> None:
        """`hidden` is where states are kept that answers come with."""
        self._runner, self._scheduler, self._proposer, self._controller = runner, scheduler, proposer, controller
        self.outputs, self._hidden, self._clock = outputs, hidden, clock
        self.last_report: StepReport | None = None
        """What the last step told the controller."""

    def step(self) -> None:
        """Run a step, if there is anything to do."""
        began, report = self._clock(), StepReport()
        scheduled = self._schedule()
        report.choice = self._proposer.chosen
        if not scheduled.rows:
            return
        self._proposer.probe_drift(scheduled.rows)
        self.run(scheduled.rows, report)
        if self._is_timed(scheduled.rows):
            report.seconds = self._clock() - began
        self._controller.observe(report)
        self.last_report = report
        self._proposer.catch_up(scheduled.rows)

    def run(self, rows: Sequence[ScheduledRow], report: StepReport) -> list[VerifyResult]:
        """Verify rows and write down what came of it."""
        results, output = self._verify(rows, report)
        for result in results:
            self._commit(result, output, report)
        return results

    def _schedule(self) -> SchedulerOutput:
        """Rows of this step; requests that lost their blocks to it start anew later."""
        scheduled = self._scheduler.plan(self._proposer.draft_slots)
        for seq in scheduled.preempted:
            self._proposer.forget(seq.key, ended=False)
        return scheduled

    def _verify(self, rows: Sequence[ScheduledRow], report: StepReport) -> tuple[list[VerifyResult], TargetOutput]:
        """Draft for rows and run the target over them; what it said, and what that means for each row."""
        drafts = self._proposer.propose(rows, report)
        began = self._clock()
        states = any(self._proposer.follows(row.seq) for row in rows)
        output = self._runner.run_rows(rows, drafts, states=states)
        results = verify(rows, drafts, output)
        if self._is_timed(rows):
            report.target = TargetTiming(
                tokens=len(rows) + sum(len(draft.tokens) for draft in drafts.values()),
                context=sum(row.start for row in rows),
                seconds=self._clock() - began,
            )
        return results, output

    def _is_timed(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether the controller learns of the time that these rows take: they decode, and it chose how."""
        return self._proposer.timed and all(row.count == 1 for row in rows)

    def _commit(self, result: VerifyResult, output: TargetOutput, report: StepReport) -> None:
        """Write down what a request got, and let it go if that was its end."""
        row, draft, seq = result.row, result.draft, result.row.seq
        stop = self.outputs.check_stop(seq, result.tokens, self._scheduler.limit(seq))
        nodes = result.nodes[: max(0, len(stop.tokens) - 1)]
        self._proposer.take_states(result, nodes, output)
        if self._hidden is not None and output.hidden_NX is not None:
            self._hidden.write(seq.blocks, row.start, states_of(result, nodes, output.hidden_NX).aux_TX)
        moved = [] if draft.is_chain else [(node, depth) for depth, node in enumerate(nodes) if node != depth]
        if moved:
            behind = row.start + row.count
            self._move(seq, [behind + node for node, _ in moved], [behind + depth for _, depth in moved])
        seq.prompt_logprobs += output.prompt_logprobs.get(seq.key, ())
        begins = row.samples and seq.new_tokens == 0
        self._scheduler.commit(seq, read=row.count + len(nodes), new_tokens=stop.tokens)
        if not row.samples:
            return
        self._proposer.settle(result, ended=stop.finished is not None, report=report)
        hidden_TX = None
        if self._hidden is not None and stop.finished is not None:
            hidden_TX = self._hidden.read(seq.blocks, seq.target_length)
        piece = self.outputs.add(
            seq,
            stop,
            drafted=len(draft.tokens),
            accepted=len(result.nodes),
            logprobs=_logprobs(seq, stop.tokens, output.logits_MV, result),
            prompt_logprobs=tuple(seq.prompt_logprobs) if begins and seq.request.prompt_logprobs is not None else None,
            hidden_TX=hidden_TX,
            suffix_drafted=draft.by_suffix,
        )
        piece.ranks = None if draft.is_chain else ranks_of(result)
        if stop.finished is not None:
            self._scheduler.finish(seq, stop.finished)
            self.outputs.close(seq.key)
            self._proposer.forget(seq.key)
            report.ended.append(seq.key)

    def _move(self, seq: SequenceState, from_slots: Sequence[int], to_slots: Sequence[int]) -> None:
        """Put the accepted path of a tree side by side, as if it had been a chain."""
        cache, size = self._runner.cache, self._runner.cache.block_size
        places = [[seq.blocks[slot // size] * size + slot % size for slot in slots] for slots in (from_slots, to_slots)]
        cache.move(*torch.tensor(places, device=self._runner.device))


def _logprobs(
    seq: SequenceState, tokens: Sequence[int], logits_MV: Tensor, result: VerifyResult
) -> tuple[TokenLogprobs, ...] | None:
    if seq.request.logprobs is None:
        return None
    rows = [result.logits_at + 1 + node for node in (-1, *result.nodes)][: len(tokens)]
    token_M = torch.tensor(list(tokens), device=logits_MV.device)
    return tuple(log_probabilities(logits_MV[rows], token_M, seq.request.logprobs))
