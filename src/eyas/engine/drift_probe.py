"""A check-up: one round of one request, drafted beside serving to the deepest depth, and watched.

Serving cannot be watched at a low price: its depths are one recording, its attention a kernel that keeps no weights,
and it stops as early as pays, so that of the depths behind that nothing would be known. So now and then a round is
drafted a second time, by the doctor's own measures: the same computation from the same states and the same keys, in
plain operations. It reads the drafter's blocks and what waits to be read, and writes nothing: serving cannot tell
whether it happened.

`DriftProbe` says when: no more often than one round in EVERY, and within a share of the time spent on such steps.

Shapes: T slots in blocks, N states that wait, D drafter hidden, X concatenated states, G key heads, K head dim.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from eyas.drafter.attention import KeysAndValues
from eyas.drafter.attention_mass import REGIONS, AttentionProbe, rms
from eyas.drafter.round_attention import RoundAttention
from eyas.drafter.rounds import draft_rounds
from eyas.engine.request import Request, SequenceState
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.speculation.drift import DriftAlarm
from eyas.kernels.attention.kv_dtype import bits
from eyas.kernels.attention.metadata import AttentionRow
from eyas.sampling import Sampling

EVERY = 32
"""Rounds between two check-ups at least: neighbours are alike and tell little."""
LONGEST_STEP = 1.0
"""Seconds between two steps that count as serving at most."""

Draw = Callable[[SequenceState, Tensor, int], Tensor]
"""A request's draft [1] by these logits [1, W], at this absolute position."""


@dataclass(frozen=True, kw_only=True)
class DriftSample:
    """What was seen of one round, depth by depth."""

    rms: tuple[float, ...]
    """Size of the state that each depth hands to the next."""
    mass: Mapping[str, tuple[float, ...]]
    """Attention by region of `attention_mass.py`."""
    tokens: tuple[int, ...]
    """The drafts; whether they would be accepted shows as the request goes on."""


@torch.inference_mode()
def examine(drafter: DrafterRunner, seq: SequenceState, states_TX: Tensor, depth: int, draw: Draw) -> DriftSample:
    """Draft `depth` tokens behind a request's newest one, given the states that wait for the drafter."""
    assert len(states_TX), "the drafter has read all there is; what it starts a round from is gone"
    model, start = drafter.model, seq.target_length - 1
    like_D = model.norm_weight  # never quantised, as `fc` may be
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
    """Looks at a round now and then and tells the alarm; later also how many of its drafts came true.

    Requests take turns, the one that was looked at longest ago first. Time is an account: nothing is looked at that
    would bring check-ups above `share` of the time of steps that draft. So they cost no more than that on any machine,
    and next to nothing where drafts do not pay. A share of 0 looks at nothing, and there is no alarm.
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
        """When the step before this one began, if it drafted."""
        self._looked_at: dict[int, int] = {}
        self._open: dict[int, tuple[SequenceState, int, tuple[int, ...]]] = {}
        """Requests with drafts of which it is not yet known how many came true, and where the first would stand."""

    def warm_up(self) -> None:
        """Examine a request that nobody made: a first check-up takes many times what the others take."""
        if not self._share:
            return
        drafter, size = self._drafter, self._drafter.cache.block_size
        asked = Request(prompt=(0,) * (size + 2), sampling=Sampling(), max_new_tokens=1)
        read = size if drafter.cache.layers else 0  # as if it had read the first block, if there are blocks yet
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
        """Whether it is time to look, in a step that drafts for so many requests. To be asked once a step."""
        if not self._share:
            return False
        now = self._clock()
        if self._last is not None:
            # Time in which nobody is served is no time to take a share of.
            self._total += min(now - self._last, LONGEST_STEP)
            self._steps += 1
        self._last = now if drafting else None
        self._rounds += drafting
        if not drafting or self._rounds < EVERY or not self._steps:
            return False
        # What the first one takes is not known; drafting for one request takes less than a step.
        cost = self._total / self._steps if self._cost is None else self._cost
        return self._alarm.seconds + cost <= self._share * self._total

    def look(self, seq: SequenceState, states_TX: Tensor) -> None:
        """Examine a request that is about to be drafted for, given the states that wait for the drafter."""
        started = self._clock()
        seen = examine(self._drafter, seq, states_TX, self._alarm.max_depth, self._draw)
        self._cost = self._clock() - started
        self._rounds = 0
        self._looked_at[seq.key] = self._alarm.checkups
        self._settle(seq.key, ended=True)
        self._open[seq.key] = seq, len(seq.tokens), seen.tokens
        self._alarm.observe_checkup(seen.rms, seen.mass, self._cost)

    def last_look(self, seq: SequenceState) -> int:
        """When a request was looked at; lower is longer ago."""
        return self._looked_at.get(seq.key, -1)

    def follow(self, chains: Sequence[tuple[int, int]]) -> None:
        """Take how many drafts each chain had and how many were accepted, and the fate of the drafts of check-ups.

        The requests' tokens are committed. Of trees nothing is told: a path may end because nothing was offered behind
        it.
        """
        if not self._share:
            return
        for (made, taken), times in Counter(chains).items():
            self._alarm.observe_round(made, taken, times)
        for key in list(self._open):
            self._settle(key)

    def _settle(self, key: int, *, ended: bool = False) -> None:
        """What came of the drafts of a check-up, once that is known; or as far as it is, if no more will be."""
        if key not in self._open:
            return
        seq, first, drafts = self._open[key]
        came = seq.tokens[first : first + len(drafts)]
        true = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, came, strict=False)))
        if true < len(came) or len(came) == len(drafts) or ended:
            del self._open[key]
            self._alarm.observe_round(len(came), true)

    def forget(self, key: int) -> None:
        """Drop a request that has ended."""
        self._settle(key, ended=True)
        self._looked_at.pop(key, None)


def _past(drafter: DrafterRunner, seq: SequenceState) -> list[KeysAndValues]:
    """Keys and values [T, G, K] of the slots that the drafter has read, of every layer."""
    if not seq.drafter_length:
        return []
    cache = drafter.cache
    row = AttentionRow(blocks=seq.blocks, base=0, count=seq.drafter_length)
    layers = [cache.layers[layer] for layer in range(len(drafter.model.layers))]
    place_T = torch.tensor(row.places(0, seq.drafter_length, cache.block_size), device=layers[0][0].device)

    def read(x_GCK: Tensor) -> Tensor:
        return bits(x_GCK).index_select(1, place_T).view(x_GCK.dtype).to(drafter.dtype).transpose(0, 1)

    return [(read(k), read(v)) for k, v in layers]
