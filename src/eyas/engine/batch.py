"""Many prompts at once: a fixed number of slots, each filled again as soon as its request is done.

Requests are pulled when there is room, so an answer may lead to the next request (a conversation's next turn), and
answers come in the order in which they end. Decoding is that of `reference.py`, row by row: in float32 the tokens are
the same up to near-ties, which other shapes of the same matrix product can turn, and so are the accepted drafts.

    plainly        one token for every slot per step. On CUDA in half precision the step is one CUDA graph, and the
                   host looks at what ended only every few steps: an ended slot repeats its last step until then,
                   which changes nothing but its own scratch
    speculatively  all rows draft, then all are verified in one pass; greedy chains

Shapes: B slots, N tokens of a pass, R rows, Q = depth + 1 verified tokens, D drafter hidden, X concatenated auxiliary
states, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.drafter.model import DepthOutput, Drafter
from eyas.engine.slots import SlotAttention, SlotCache, SlotTarget, Spans
from eyas.errors import UserError
from eyas.sampling import Sampling, probabilities, require_unshaped
from eyas.target.capture import capture
from eyas.target.model import Target

STEPS_BETWEEN_LOOKS = 16
PREFILL_TOKENS = 32_768
"""Prompt tokens of one pass, unless a single prompt has more."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to answer."""

    key: int
    """The caller's own; comes back with the answer."""
    prompt: tuple[int, ...]
    max_new_tokens: int

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError(f"the prompt of request {self.key} has 0 tokens; give at least 1")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens of request {self.key} is {self.max_new_tokens}; it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a request got."""

    key: int
    tokens: tuple[int, ...]
    """New tokens, the stop token included."""
    stopped: bool
    """Whether a stop token ended it, rather than a length."""
    accepted: tuple[int, ...] = ()
    """Accepted drafts of each round; empty without speculation."""


Pull = Callable[[], Request | None]
"""The next request, or None when there is none right now. Asked again after every answer."""


def answer_plainly(
    target: Target,
    pull: Pull,
    *,
    sampling: Sampling,
    slots: int,
    max_length: int,
    stop_ids: Collection[int],
    seed: int = 0,
    graph: bool = True,
) -> Iterator[Answer]:
    """Answer until `pull` has nothing and every slot is empty.

    Prompt and answer together hold `max_length` tokens at most. Sampling repeats by seed only for the same requests
    in the same order with the same slots. `graph` allows a CUDA graph where one can be used.
    """
    require_unshaped(sampling, "decoding in slots")
    batch = _PlainBatch(target, sampling, slots=slots, max_length=max_length, stop_ids=stop_ids, seed=seed, graph=graph)
    running: dict[int, Request] = {}
    waiting: deque[Request] = deque()
    ended: list[Answer] = []
    while True:
        for pack in _packs(_admit(lambda: waiting.popleft() if waiting else None, running, slots, max_length)):
            batch.prefill(pack)
        if running:
            batch.advance()
        # While the device decodes, the host hands out what ended before and fetches what comes next.
        yield from ended
        while len(running) + len(waiting) < slots and (request := pull()) is not None:
            waiting.append(request)
        if not running and not waiting:
            return
        ended = [
            Answer(key=running.pop(slot).key, tokens=tokens, stopped=stopped)
            for slot, tokens, stopped in (batch.ended(running) if running else ())
        ]


def answer_speculatively(
    target: Target,
    drafter: Drafter,
    pull: Pull,
    *,
    depth: int,
    slots: int,
    max_length: int,
    stop_ids: Collection[int],
) -> Iterator[Answer]:
    """Answer greedily with chains of `depth` drafts, until `pull` has nothing and every slot is empty.

    Rounds are complete even where the last one overshoots; tokens are cut to fit, accepted counts are not.
    """
    if depth < 1:
        raise UserError(f"depth is {depth}; speculation drafts 1 token or more, use answer_plainly for none")
    batch = _SpeculativeBatch(target, drafter, depth=depth, slots=slots, max_length=max_length)
    running: dict[int, Request] = {}
    progress: dict[int, _Progress] = {}
    while True:
        admitted = _admit(pull, running, slots, max_length)
        for pack in _packs(admitted):
            for (slot, request), token in zip(pack, batch.prefill(pack), strict=True):
                progress[slot] = _Progress(limit=_limit(request, max_length), tokens=[token])
        if not running:
            return
        growing = [slot for slot in running if progress[slot].end(stop_ids) is None]
        for slot, new in zip(growing, batch.round(growing) if growing else (), strict=True):
            progress[slot].tokens += new
            progress[slot].accepted.append(len(new) - 1)
        for slot in list(running):
            end = progress[slot].end(stop_ids)
            if end is not None:
                done = progress.pop(slot)
                yield Answer(
                    key=running.pop(slot).key,
                    tokens=tuple(done.tokens[:end]),
                    stopped=done.tokens[end - 1] in stop_ids,
                    accepted=tuple(done.accepted),
                )


@dataclass(kw_only=True)
class _Progress:
    """Where a speculated answer stands."""

    limit: int
    tokens: list[int]
    accepted: list[int] = field(default_factory=list)

    def end(self, stop_ids: Collection[int]) -> int | None:
        """How many tokens the answer has, once it has ended."""
        stop = next((i for i, token in enumerate(self.tokens) if token in stop_ids), None)
        if stop is not None and stop < self.limit:
            return stop + 1
        return self.limit if len(self.tokens) >= self.limit else None


Admitted = tuple[int, Request]


def _admit(pull: Pull, running: dict[int, Request], slots: int, max_length: int) -> list[Admitted]:
    """Fill empty slots, as far as there are requests."""
    admitted: list[Admitted] = []
    for slot in range(slots):
        if slot in running:
            continue
        request = pull()
        if request is None:
            break
        if len(request.prompt) > max_length - 1:
            raise UserError(
                f"the prompt of request {request.key} has {len(request.prompt)} tokens, above the "
                f"{max_length - 1} that leave room for an answer; shorten it or raise the longest context {max_length}"
            )
        running[slot] = request
        admitted.append((slot, request))
    return admitted


def _packs(admitted: Sequence[Admitted]) -> Iterator[list[Admitted]]:
    """Divide prompts into passes."""
    pack: list[Admitted] = []
    tokens = 0
    for slot, request in admitted:
        if pack and tokens + len(request.prompt) > PREFILL_TOKENS:
            yield pack
            pack, tokens = [], 0
        pack.append((slot, request))
        tokens += len(request.prompt)
    if pack:
        yield pack


def _limit(request: Request, max_length: int) -> int:
    return min(request.max_new_tokens, max_length - len(request.prompt))


def _prompts(pack: Sequence[Admitted], device: torch.device) -> tuple[Tensor, Spans]:
    """The prompts of a pack as one pass."""
    ids_N = torch.tensor([token for _, request in pack for token in request.prompt], device=device)
    return ids_N, Spans.of([(slot, 0, len(request.prompt)) for slot, request in pack], device)


class _PlainBatch:
    """One token for every slot per step; all state lies on the device."""

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        *,
        slots: int,
        max_length: int,
        stop_ids: Collection[int],
        seed: int,
        graph: bool,
    ) -> None:
        device = target.device
        self._model = SlotTarget(target, slots=slots, length=max_length)
        self._name, self._device, self._sampling, self._length = target.facts.source, device, sampling, max_length
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        self._every_B = torch.arange(slots, device=device)
        # An empty slot is one that has ended: it computes on position 0 of its own until a prompt takes it.
        self._token_B, self._position_B, self._made_B, self._limit_B = torch.zeros(
            4, slots, dtype=torch.int64, device=device
        )
        self._ended_B = torch.ones(slots, dtype=torch.bool, device=device)
        self._stopped_B = torch.zeros(slots, dtype=torch.bool, device=device)
        # The last column is where ended slots write.
        self._output = torch.zeros(slots, max_length + 1, dtype=torch.int64, device=device)
        half = target.dtype in (torch.bfloat16, torch.float16)
        self._graph = self._captured() if graph and device.type == "cuda" and half else None

    @torch.inference_mode()
    def prefill(self, pack: Sequence[Admitted]) -> None:
        """Read prompts into their slots and decode the first token of each answer."""
        ids_N, spans = _prompts(pack, self._device)
        logits_RV = self._model.forward(ids_N, spans, spans.last_R)
        slot_R = spans.slot_R
        self._made_B[slot_R] = 0
        self._limit_B[slot_R] = torch.tensor(
            [_limit(request, self._length) for _, request in pack], device=self._device
        )
        self._position_B[slot_R] = spans.used_R.long() - 1
        self._ended_B[slot_R] = False
        self._stopped_B[slot_R] = False
        self._commit(slot_R, self._pick(logits_RV))

    def advance(self) -> None:
        """Decode until it is time to look; with a graph this returns before it is done."""
        if self._graph is None:
            self._step(longest_k=int(self._position_B.max()) + 1)
        else:
            for _ in range(STEPS_BETWEEN_LOOKS):
                self._graph.replay()

    def ended(self, running: Collection[int]) -> list[tuple[int, tuple[int, ...], bool]]:
        """Slot, tokens and whether a stop token ended it, of each running slot that ended."""
        ended, stopped, made = torch.stack([self._ended_B, self._stopped_B, self._made_B]).tolist()
        slots = [slot for slot in running if ended[slot]]
        if not slots:
            return []
        longest = max(made[slot] for slot in slots)
        rows = self._output[torch.tensor(slots, device=self._device), :longest].tolist()
        return [(slot, tuple(row[: made[slot]]), bool(stopped[slot])) for slot, row in zip(slots, rows, strict=True)]

    @torch.inference_mode()
    def _step(self, *, longest_k: int) -> None:
        spans = Spans.even(self._every_B, self._position_B, 1, longest_k=longest_k, every_slot=True)
        logits_BV = self._model.forward(self._token_B, spans)
        self._commit(self._every_B, self._pick(logits_BV))

    def _pick(self, logits_RV: Tensor) -> Tensor:
        if self._sampling.temperature == 0:
            return logits_RV.argmax(dim=-1)
        p_RV = probabilities(logits_RV, self._sampling)
        # The least of exponential variables of rates p is the i-th with probability p_i: a draw without a host.
        return (p_RV / torch.empty_like(p_RV).exponential_(generator=self._generator)).argmax(dim=-1)

    def _commit(self, slot_R: Tensor, next_R: Tensor) -> None:
        """Append a token to each slot that has not ended, and see which end with it."""
        over_R, made_R = self._ended_B[slot_R], self._made_B[slot_R]
        live_R = ~over_R
        self._output[slot_R, made_R.masked_fill(over_R, self._length)] = next_R
        made_R = made_R + live_R
        stop_R = live_R & (next_R[:, None] == self._stops).any(dim=-1)
        self._made_B[slot_R] = made_R
        self._token_B[slot_R] = torch.where(live_R, next_R, self._token_B[slot_R])
        self._position_B[slot_R] = self._position_B[slot_R] + live_R
        self._stopped_B[slot_R] = self._stopped_B[slot_R] | stop_R
        self._ended_B[slot_R] = over_R | stop_R | (made_R >= self._limit_B[slot_R])

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Record the step. No slot runs yet, so the steps taken for it leave nothing behind."""
        self._step(longest_k=self._length)
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            self._step(longest_k=self._length)
        torch.cuda.current_stream(self._device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        try:
            with torch.cuda.device(self._device), torch.cuda.graph(graph):
                self._step(longest_k=self._length)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise UserError(f"{self._name} cannot be recorded as a CUDA graph ({reason}); pass graph=False") from error
        return graph


class _SpeculativeBatch:
    """Target and drafter over the same slots, and where each slot's draft begins."""

    def __init__(self, target: Target, drafter: Drafter, *, depth: int, slots: int, max_length: int) -> None:
        # A round may begin one token before the end and run past it.
        length = max_length + depth
        self._target, self._drafter, self._depth = target, drafter, depth
        self._model = SlotTarget(target, slots=slots, length=length)
        self._cache = SlotCache(slots=slots, length=length)
        self._vocab = drafter.vocab()
        self._layer_ids = drafter.config.aux_layer_ids or target.facts.default_aux_layer_ids()
        device, dtype = target.device, drafter.fc.weight.dtype
        # The newest token, which the target has not read yet, and how many tokens there are with it.
        self._newest_B, self._count_B = torch.zeros(2, slots, dtype=torch.int64, device=device)
        # What the drafter left at the last token but one, whose successor is the newest.
        self._normed_BD, self._feedback_BD = torch.zeros(
            2, slots, drafter.config.hidden_size, dtype=dtype, device=device
        )

    @torch.inference_mode()
    def prefill(self, pack: Sequence[Admitted]) -> list[int]:
        """Read prompts, with the drafter too, and return the first token of each answer."""
        ids_N, spans = _prompts(pack, self._target.device)
        slot_R, last_R = spans.slot_R, spans.last_R
        with capture(self._target.model, self._layer_ids) as captured:
            first_R = self._model.forward(ids_N, spans, last_R).argmax(dim=-1)
        shifted_N = ids_N.roll(-1)
        shifted_N[last_R] = first_R
        output = self._read(captured.aux_hidden()[0], shifted_N, spans)
        self._keep(slot_R, output, last_R, first_R)
        self._count_B[slot_R] = spans.used_R.long() + 1
        return first_R.tolist()

    @torch.inference_mode()
    def round(self, slots: Sequence[int]) -> list[list[int]]:
        """Draft and verify; the new tokens of each slot: what was accepted and one of the target's own."""
        slot_R = torch.tensor(slots, device=self._target.device)
        count_R = self._count_B[slot_R]
        longest = int(count_R.max())
        draft_RS = self._draft(slot_R, count_R, longest)
        spans = Spans.even(slot_R, count_R - 1, self._depth + 1, longest_k=longest + self._depth)
        ids_RQ = torch.cat([self._newest_B[slot_R, None], draft_RS], dim=1)
        with capture(self._target.model, self._layer_ids) as captured:
            own_N = self._model.forward(ids_RQ.flatten(), spans).argmax(dim=-1)
        own_RQ = own_N.view_as(ids_RQ)
        accepted_R = (own_RQ[:, :-1] == draft_RS).long().cumprod(dim=1).sum(dim=1)
        # Every verified slot is read, the rejected ones too: they lie behind the last valid one, where nothing sees
        # them before the next draft writes there. So no shape depends on what was accepted.
        output = self._read(captured.aux_hidden()[0], own_N, spans)
        place_R = torch.arange(len(slots), device=slot_R.device)
        last_R = place_R * (self._depth + 1) + accepted_R
        self._keep(slot_R, output, last_R, own_N[last_R])
        self._count_B[slot_R] = count_R + accepted_R + 1
        rows = torch.cat([accepted_R[:, None], own_RQ], dim=1).tolist()
        return [own[: accepted + 1] for accepted, *own in rows]

    def _draft(self, slot_R: Tensor, count_R: Tensor, longest: int) -> Tensor:
        """Chains [R, depth] of the drafter's most likely tokens."""
        normed_RD, feedback_RD = self._normed_BD[slot_R], self._feedback_BD[slot_R]
        drafts = [self._likeliest(normed_RD)]
        for depth in range(1, self._depth):
            # The last slot read stands at count - 2: the newest token is its successor.
            spans = Spans.even(slot_R, count_R - 2 + depth, 1, longest_k=longest - 1 + depth)
            output = self._drafter.step(feedback_RD, drafts[-1], spans.position_N, SlotAttention(self._cache, spans))
            feedback_RD = output.feedback
            drafts.append(self._likeliest(output.normed))
        return torch.stack(drafts, dim=1)

    def _likeliest(self, normed_RD: Tensor) -> Tensor:
        return self._vocab.to_target(self._drafter.logits(normed_RD).argmax(dim=-1))

    def _read(self, aux_NX: Tensor, shifted_N: Tensor, spans: Spans) -> DepthOutput:
        """Depth 0: the target's true states beside each token's successor."""
        hidden_ND = self._drafter.fuse(aux_NX.to(self._drafter.fc.weight.dtype))
        return self._drafter.step(hidden_ND, shifted_N, spans.position_N, SlotAttention(self._cache, spans))

    def _keep(self, slot_R: Tensor, output: DepthOutput, last_R: Tensor, newest_R: Tensor) -> None:
        self._normed_BD[slot_R] = output.normed[last_R]
        self._feedback_BD[slot_R] = output.feedback[last_R]
        self._newest_B[slot_R] = newest_R
