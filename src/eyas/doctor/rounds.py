"""Drafting from every place of an answer at once, exactly as serving drafts, and the walk that serving takes.

A round that starts at slot s has read the target's true states up to s and the newest token s + 1; depth 1 drafts token
s + 2. In serving the drafter's keys of verified slots come from true states only, so the slots before every round are
one pass over the transcript. Behind it each round goes on by itself: it feeds back its own drafts and its own state and
sees, besides the verified slots up to s, its own earlier drafts and nobody else's. All rounds take a depth in one call.

Which of these rounds serving would really start depends on what is accepted: `walk` follows them, so that acceptance is
what serving with that depth measures, round by round.

Shapes: T slots of the transcript, R rounds, S depths, D drafter hidden, X concatenated auxiliary states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.doctor.transcripts import Transcript
from eyas.drafter.attention_mass import rms
from eyas.drafter.model import Drafter
from eyas.drafter.round_attention import RoundAttention, Watcher
from eyas.drafter.rounds import draft_rounds
from eyas.drafter.vocab import DraftVocab

NO_TOKEN = -2
"""Stands where nothing was drafted; differs from what stands behind a transcript's end."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Disturbs every hidden state that the drafter receives: the fused ones and the fed-back ones."""

    size: float
    """Standard deviation in parts of the state's own RMS."""
    seed: int = 0

    def generator(self) -> torch.Generator:
        """The same disturbance for every drafter of the same width."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """What every possible round of a transcript drafted."""

    key: int
    token_SR: NDArray[np.int64]
    hit_SR: NDArray[np.bool_]
    """Whether the draft is the token that the target's answer has there. Only meaningful where all before it hit."""
    confidence_SR: NDArray[np.float64]
    """The drafter's probability of its draft."""
    rms_SR: NDArray[np.float64]
    """Of the state that this depth hands to the next."""
    surprise_R: NDArray[np.float64]
    """- ln of the probability that the first draft's distribution gives to the target's token: what training lowers.
    Tells more than hits do where two drafters are nearly alike."""

    @property
    def accepted_R(self) -> NDArray[np.int64]:
        """Drafts that serving would accept if it drafted to the deepest depth."""
        return np.asarray(np.cumprod(self.hit_SR, axis=0).sum(axis=0), dtype=np.int64)

    def walk(self, depth: int) -> list[int]:
        """The rounds that serving with this depth would start, as indices of R."""
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
    """Slots from which a round can start: the newest token is of the answer and does not end it."""
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
    """Draft to `depth` from every start; None where the answer is too short for any round.

    `aux_TX` replaces the transcript's own states: for counterfactual repairs. `starts` are the slots to start from, if
    not all. `to_first_miss` ends a round there, which is all that acceptance needs: what lies behind is left unknown.
    """
    starts = round_starts(transcript) if starts is None else starts
    if not starts:
        return None
    aux_TX = transcript.aux_of(layer_ids) if aux_TX is None else aux_TX
    device = aux_TX.device
    start_R = torch.tensor(list(starts), device=device)
    ids_T = torch.tensor(transcript.ids, device=device)
    slots = max(starts) + 1
    vocab = drafter.vocab()
    rounds, answer_SR = _Drafted(depth, len(starts)), _answers(transcript, starts, depth)
    live = np.arange(len(starts))

    def choose(level: int, logits_RW: Tensor, feedback_RD: Tensor) -> tuple[Tensor, Tensor | None]:
        nonlocal live
        p_RW = logits_RW.float().softmax(dim=-1)
        if level == 1:
            rounds.surprise_R = _surprise(p_RW, torch.from_numpy(answer_SR[0]).to(device), vocab)
        best = p_RW.max(dim=-1)
        token_R = vocab.to_target(best.indices)
        rounds.write(level, live, token_R, best.values, rms(feedback_RD))
        if not to_first_miss:
            return token_R, None
        hit = rounds.token_SR[level - 1, live] == answer_SR[level - 1, live]
        live = live[hit]
        return token_R, torch.from_numpy(hit).to(device)

    draft_rounds(
        drafter,
        drafter.fuse(aux_TX[:slots].to(drafter.fc.weight.dtype)),
        ids_T[1 : slots + 1],
        torch.arange(slots, device=device),
        RoundAttention(start_R, watcher),
        depth=depth,
        choose=choose,
        disturb=_disturbance(noise),
    )
    return Rounds(
        key=transcript.key,
        token_SR=rounds.token_SR,
        hit_SR=rounds.token_SR == answer_SR,
        confidence_SR=rounds.confidence_SR,
        rms_SR=rounds.rms_SR,
        surprise_R=rounds.surprise_R,
    )


def _surprise(p_RW: Tensor, token_R: Tensor, vocab: DraftVocab) -> NDArray[np.float64]:
    """What is less likely than one in a million, or cannot be drafted at all, counts as that."""
    draft_id_V = torch.full((vocab.vocab_size,), -1, device=p_RW.device)
    draft_id_V[vocab.target_ids_W] = torch.arange(len(vocab.target_ids_W), device=p_RW.device)
    draft_id_R = draft_id_V[token_R]
    p_R = p_RW.gather(1, draft_id_R.clamp(min=0)[:, None])[:, 0].masked_fill(draft_id_R < 0, 0.0)
    return np.asarray(-p_R.clamp(min=1e-6).log().double().cpu().numpy())


class _Drafted:
    """Tables to be filled; what is not drafted has no token and no numbers."""

    def __init__(self, depth: int, rounds: int) -> None:
        self.token_SR = np.full((depth, rounds), NO_TOKEN, dtype=np.int64)
        self.confidence_SR = np.full((depth, rounds), np.nan)
        self.rms_SR = np.full((depth, rounds), np.nan)
        self.surprise_R = np.full(rounds, np.nan)

    def write(self, level: int, live: NDArray[np.int64], token: Tensor, confidence: Tensor, size: Tensor) -> None:
        self.token_SR[level - 1, live] = token.cpu().numpy()
        self.confidence_SR[level - 1, live] = confidence.double().cpu().numpy()
        self.rms_SR[level - 1, live] = size.double().cpu().numpy()


def _answers(transcript: Transcript, starts: Sequence[int], depth: int) -> NDArray[np.int64]:
    """The target's own tokens [S, R] at the places of the drafts; -1 where the transcript ends before."""
    ids = np.concatenate([np.array(transcript.ids), np.full(depth + 2, -1)])
    return np.stack([ids[np.asarray(starts) + 1 + level] for level in range(1, depth + 1)])


def _disturbance(noise: Noise | None) -> Callable[[Tensor], Tensor]:
    if noise is None:
        return lambda hidden: hidden
    generator, size = noise.generator(), noise.size

    def disturb(hidden: Tensor) -> Tensor:
        chance = torch.randn(hidden.shape, generator=generator).to(hidden)
        return hidden + size * rms(hidden)[..., None].to(hidden.dtype) * chance

    return disturb
