"""Drafting from every position of an answer at once, with the computation of serving.

A round that starts at slot s has read the target's true states up to s and the newest token s + 1; depth 1 drafts token
s + 2. In serving the drafter's keys of verified slots come from true states only, so the slots before every round are
one pass over the transcript. Each round then feeds back its own drafts and states, and attends to the verified slots up
to s and to its own earlier drafts. All rounds take a depth in one call.

Which rounds serving would start depends on acceptance: `walk` follows them, so acceptance is that of serving.

Shapes: T slots of the transcript, R rounds, S depths, D drafter hidden, X concatenated auxiliary states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.doctor.transcripts import Transcript
from eyas.drafter.attention_mass import rms
from eyas.drafter.model import Drafter
from eyas.drafter.rounds import RoundAttention, Watcher, draft_rounds
from eyas.drafter.vocab import DraftVocab

NO_TOKEN = -2
"""Token where nothing was drafted; it differs from the -1 behind a transcript's end."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Gaussian noise on every hidden state that the drafter receives, fused or fed back."""

    size: float
    """Standard deviation relative to the state's own RMS."""
    seed: int = 0

    def __call__(self, generator: torch.Generator, hidden: Tensor) -> Tensor:
        chance = torch.randn(hidden.shape, generator=generator).to(hidden)
        return hidden + self.size * rms(hidden)[..., None].to(hidden.dtype) * chance


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """Drafts of every possible round of a transcript."""

    key: int
    token_SR: NDArray[np.int64]
    hit_SR: NDArray[np.bool_]
    """Whether the draft equals the token of the answer. Meaningful only where all drafts before it do."""
    confidence_SR: NDArray[np.float64]
    """The drafter's probability of its draft."""
    rms_SR: NDArray[np.float64]
    """RMS of the state that this depth feeds back to the next."""
    surprise_R: NDArray[np.float64]
    """- ln of the first draft's probability of the target's token, the training loss. It separates drafters that are
    nearly alike better than hits do."""

    @property
    def accepted_R(self) -> NDArray[np.int64]:
        """Accepted drafts of each round, drafting to the deepest depth."""
        return np.asarray(np.cumprod(self.hit_SR, axis=0).sum(axis=0), dtype=np.int64)

    def walk(self, depth: int) -> list[int]:
        """Indices of the rounds that serving with this depth would start."""
        accepted = self.accepted_R.tolist()
        place, started = 0, []
        while place < len(accepted):
            started.append(place)
            place += min(accepted[place], depth) + 1
        return started

    def accepted(self, depth: int) -> list[int]:
        """Accepted drafts of each round of the walk."""
        accepted = self.accepted_R
        return [min(int(accepted[place]), depth) for place in self.walk(depth)]


def round_starts(transcript: Transcript) -> range:
    """Slots from which a round can start: the newest token is of the answer, but not its last."""
    return range(transcript.prompt_length - 1, transcript.prompt_length + transcript.answer_length - 2)


@torch.inference_mode()
def run_rounds(
    drafter: Drafter,
    transcript: Transcript,
    *,
    depth: int,
    layer_ids: Sequence[int],
    watcher: Watcher | None = None,
    noise: Noise | None = None,
    aux_TX: Tensor | None = None,
    starts: Sequence[int] | None = None,
    to_first_miss: bool = False,
) -> Rounds | None:
    """Draft to `depth` from every start; return None where the answer is too short for any round.

    `aux_TX` replaces the transcript's own states, `starts` the slots to start from. With `to_first_miss` a round ends
    at its first miss, which is enough for acceptance; deeper drafts stay unknown.
    """
    starts = round_starts(transcript) if starts is None else starts
    if not starts:
        return None
    aux_TX = transcript.aux_of(layer_ids) if aux_TX is None else aux_TX
    device = aux_TX.device
    start_R = torch.tensor(list(starts), device=device)
    ids_T = torch.tensor(transcript.ids, device=device)
    slots = max(starts) + 1
    vocab, answer_SR = drafter.vocab(), _answers(transcript, starts, depth)
    shape = (depth, len(starts))
    found = Rounds(
        key=transcript.key,
        token_SR=np.full(shape, NO_TOKEN, dtype=np.int64),
        hit_SR=np.zeros(shape, dtype=np.bool_),
        confidence_SR=np.full(shape, np.nan),
        rms_SR=np.full(shape, np.nan),
        surprise_R=np.full(len(starts), np.nan),
    )
    live = np.arange(len(starts))

    def choose(level: int, logits_RW: Tensor, feedback_RD: Tensor) -> tuple[Tensor, Tensor | None]:
        nonlocal live
        p_RW = logits_RW.float().softmax(dim=-1)
        if level == 1:
            found.surprise_R[:] = _surprise(p_RW, torch.from_numpy(answer_SR[0]).to(device), vocab)
        best = p_RW.max(dim=-1)
        token_R = vocab.to_target(best.indices)
        drafted = token_R.cpu().numpy()
        hit = drafted == answer_SR[level - 1, live]
        found.token_SR[level - 1, live] = drafted
        found.hit_SR[level - 1, live] = hit
        found.confidence_SR[level - 1, live] = best.values.double().cpu().numpy()
        found.rms_SR[level - 1, live] = rms(feedback_RD).double().cpu().numpy()
        if not to_first_miss:
            return token_R, None
        live = live[hit]
        return token_R, torch.from_numpy(hit).to(device)

    disturb = None if noise is None else partial(noise, torch.Generator().manual_seed(noise.seed))
    draft_rounds(
        drafter,
        drafter.fuse(aux_TX[:slots].to(drafter.fc.weight.dtype)),
        ids_T[1 : slots + 1],
        torch.arange(slots, device=device),
        RoundAttention(start_R, watcher),
        depth=depth,
        choose=choose,
        disturb=disturb or (lambda hidden: hidden),
    )
    return found


def _surprise(p_RW: Tensor, token_R: Tensor, vocab: DraftVocab) -> NDArray[np.float64]:
    """- ln p of the target's tokens; p is at least one in a million, also for tokens that cannot be drafted."""
    draft_id_V = torch.full((vocab.vocab_size,), -1, device=p_RW.device)
    draft_id_V[vocab.target_ids_W] = torch.arange(len(vocab.target_ids_W), device=p_RW.device)
    draft_id_R = draft_id_V[token_R]
    p_R = p_RW.gather(1, draft_id_R.clamp(min=0)[:, None])[:, 0].masked_fill(draft_id_R < 0, 0.0)
    return np.asarray(-p_R.clamp(min=1e-6).log().double().cpu().numpy())


def _answers(transcript: Transcript, starts: Sequence[int], depth: int) -> NDArray[np.int64]:
    """The target's tokens [S, R] at the positions of the drafts; -1 behind the end of the transcript."""
    ids = np.concatenate([np.array(transcript.ids), np.full(depth + 2, -1)])
    return np.stack([ids[np.asarray(starts) + 1 + level] for level in range(1, depth + 1)])
