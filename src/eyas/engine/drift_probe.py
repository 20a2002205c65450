"""Drift check-ups: drafts one round of one request a second time, to the deepest depth, with measurements.

Serving cannot be measured cheaply: it replays CUDA graphs, its attention kernels keep no weights, and it stops at the
depth that pays. So now and then a round is drafted again by the doctor's code, in plain operations, from the same
states, keys and values. The check-up reads the drafter's blocks and the waiting states and writes nothing, so serving
is not affected.

`DriftProbe` decides when: at most one round in EVERY, within a share of the time of drafting steps.

Shapes: T slots in blocks, N waiting states, D drafter hidden, X concatenated states, G key heads, K head dim.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from eyas.drafter.attention import KeysAndValues
from eyas.drafter.attention_mass import REGIONS, AttentionProbe, rms
from eyas.drafter.rounds import RoundAttention, draft_rounds
from eyas.engine.request import Request, SequenceState
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.speculation.drift import DriftAlarm
from eyas.kernels.attention.kv_dtype import bits
from eyas.kernels.attention.metadata import AttentionRow
from eyas.sampling import Sampling

EVERY = 32
"""Least number of rounds between check-ups; rounds close together tell little new."""
LONGEST_STEP = 1.0
"""Longest interval between steps, in seconds, that counts as serving time."""

Draw = Callable[[SequenceState, Tensor, int], Tensor]
"""Draws a request's draft [1] from logits [1, W] at an absolute position."""


@dataclass(frozen=True, kw_only=True)
class DriftSample:
    """Measurements of one round, by depth."""

    rms: tuple[float, ...]
    """RMS of the state that each depth passes to the next."""
    mass: Mapping[str, tuple[float, ...]]
    """Attention mass by region (`attention_mass.py`)."""
    tokens: tuple[int, ...]
    """The drafts; whether they are accepted shows later."""


@torch.inference_mode()
def examine(drafter: DrafterRunner, seq: SequenceState, states_TX: Tensor, depth: int, draw: Draw) -> DriftSample:
    """Draft `depth` tokens for a request from the states that wait for the drafter, and measure."""
    assert len(states_TX), "no states wait: the drafter has read all of them"
    model, start = drafter.model, seq.target_length - 1
    like_D = model.norm_weight  # never quantised, unlike `fc`
    device = like_D.device
    start_R = torch.tensor([start], device=device)
    recorder = AttentionProbe(start_R, prompt_length=seq.prompt_length, depth=depth)
    attention = RoundAttention(start_R, recorder, past=_past(drafter, seq), window=drafter.window, sinks=drafter.sinks)
    hidden = model.fuse(states_TX.to(like_D.dtype))
    token_N = torch.tensor(seq.tokens[seq.drafter_length + 1 : seq.target_length + 1], device=device)
    position_N = torch.arange(seq.drafter_length, seq.target_length, device=device)
    assert len(hidden) == len(token_N), "one state for every token but the newest"
    sizes, tokens = [], list[int]()

    def choose(level: int, logits_1W: Tensor, feedback_1D: Tensor) -> tuple[Tensor, None]:
        sizes.append(rms(feedback_1D))
        token_1 = draw(seq, logits_1W, len(seq.tokens) + len(tokens))
        tokens.append(int(token_1))
        return token_1, None

    draft_rounds(model, hidden, token_N, position_N, attention, depth=depth, choose=choose)
    looks = recorder.statistics()
    return DriftSample(
        rms=tuple(torch.cat(sizes).tolist()),
        mass={region: tuple(looks.mass[region][:, 0].tolist()) for region in REGIONS},
        tokens=tuple(tokens),
    )


class DriftProbe:
    """Runs check-ups within a time budget and reports them to the drift alarm, later with the accepted drafts.

    Requests take turns, starting with the one checked longest ago. A check-up runs only if all check-ups together stay
    below `share` of the time of drafting steps. A share of 0 turns check-ups and alarm off.
    """

    def __init__(
        self,
        drafter: DrafterRunner,
        alarm: DriftAlarm,
        *,
        share: float,
        draw: Draw,
        clock: Callable[[], float],
    ) -> None:
        self._drafter, self._alarm, self._share, self._draw = drafter, alarm, share, draw
        self._clock = clock
        self._rounds = self._steps = 0
        self._total = 0.0
        self._cost: float | None = None
        self._last: float | None = None
        """Time of the previous step, if it drafted."""
        self._looked_at: dict[int, int] = {}
        self._open: dict[int, tuple[SequenceState, int, tuple[int, ...]]] = {}
        """Check-ups whose accepted drafts are not known yet: request, position of the first draft, drafts."""

    def warm_up(self) -> None:
        """Examine a dummy request, because the first check-up is much slower than later ones."""
        if not self._share:
            return
        drafter, size = self._drafter, self._drafter.cache.block_size
        asked = Request(prompt=(0,) * (size + 2), sampling=Sampling(), max_new_tokens=1)
        read = size if drafter.cache.layers else 0  # pretend that the first block was read, if there are blocks
        seq = SequenceState(key=-1, arrival=-1, request=asked, drafter_length=read, target_length=read + 1, blocks=[0])
        config, weight = drafter.model.config, drafter.model.norm_weight
        states_TX = weight.new_zeros(1, config.num_aux_hidden_states * config.target_hidden_size)

        def likeliest(_seq: SequenceState, logits_1W: Tensor, _at: int) -> Tensor:
            return drafter.token_W[logits_1W.argmax(dim=-1)]

        for _ in range(2):
            started = self._clock()
            examine(drafter, seq, states_TX, self._alarm.max_depth, likeliest)
            self._cost = self._clock() - started

    def due(self, drafting: int) -> bool:
        """Whether a check-up is due, in a step that drafts for `drafting` requests. Called once per step."""
        if not self._share:
            return False
        now = self._clock()
        if self._last is not None:
            # Idle time does not count.
            self._total += min(now - self._last, LONGEST_STEP)
            self._steps += 1
        self._last = now if drafting else None
        self._rounds += drafting
        if not drafting or self._rounds < EVERY or not self._steps:
            return False
        # Before the first check-up its cost is unknown; drafting for one request takes less than a step.
        cost = self._total / self._steps if self._cost is None else self._cost
        return self._alarm.seconds + cost <= self._share * self._total

    def look(self, seq: SequenceState, states_TX: Tensor) -> None:
        """Examine a request that will be drafted for, from the states that wait for the drafter."""
        started = self._clock()
        seen = examine(self._drafter, seq, states_TX, self._alarm.max_depth, self._draw)
        self._cost = self._clock() - started
        self._rounds = 0
        self._looked_at[seq.key] = self._alarm.checkups
        self._settle(seq.key, ended=True)
        self._open[seq.key] = seq, len(seq.tokens), seen.tokens
        self._alarm.observe_checkup(seen.rms, seen.mass, self._cost)

    def last_look(self, seq: SequenceState) -> int:
        """When a request was last examined; lower is longer ago."""
        return self._looked_at.get(seq.key, -1)

    def follow(self, chains: Sequence[tuple[int, int]]) -> None:
        """Take the drafted and accepted counts of chains, and score open check-ups against committed tokens.

        Trees are not counted: their paths may end only because no further node was drafted.
        """
        if not self._share:
            return
        for (made, taken), times in Counter(chains).items():
            self._alarm.observe_round(made, taken, times)
        for key in list(self._open):
            self._settle(key)

    def _settle(self, key: int, *, ended: bool = False) -> None:
        """Report the accepted drafts of a check-up once known, or the known part if the request ended."""
        if key not in self._open:
            return
        seq, first, drafts = self._open[key]
        came = seq.tokens[first : first + len(drafts)]
        true = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, came, strict=False)))
        if true < len(came) or len(came) == len(drafts) or ended:
            del self._open[key]
            self._alarm.observe_round(len(came), true)

    def forget(self, key: int) -> None:
        self._settle(key, ended=True)
        self._looked_at.pop(key, None)


def _past(drafter: DrafterRunner, seq: SequenceState) -> list[KeysAndValues]:
    """Keys and values [T, G, K] of the slots that the drafter has read, for every layer."""
    if not seq.drafter_length:
        return []
    cache = drafter.cache
    row = AttentionRow(blocks=seq.blocks, base=0, count=seq.drafter_length)
    layers = [cache.layers[layer] for layer in range(len(drafter.model.layers))]
    place_T = torch.tensor(row.places(0, seq.drafter_length, cache.block_size), device=layers[0][0].device)

    def read(x_GCK: Tensor) -> Tensor:
        return bits(x_GCK).index_select(1, place_T).view(x_GCK.dtype).to(drafter.dtype).transpose(0, 1)

    return [(read(k), read(v)) for k, v in layers]
