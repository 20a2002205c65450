"""The law of the engine as the host would compute it, request by request: from logits to the token of a position.

The token at a position is a function of the target's distribution p there and of the request's own noise for that
position (`kernels/noise.py`): it is argmax p / E, or the largest logit if the request is greedy. So
P(token = v) = p(v), whatever was drafted, and a draft is accepted if it is that token. Verification is comparison.

That makes speculation lossless by construction. p is the target's own with every option applied, given the tokens
before it; noise is never shared between positions; and nothing here reads a draft before the target's token is chosen.
How deep is drafted, by whom and why it was stopped can cost acceptance, but cannot show in the output: not even a
controller that looks at the token it is about to submit, which biases rejection sampling.

Drafts are drawn against the same noise, argmax q / E: the closer q is to p, the more often both races have one winner
(Gumbel coupling; sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i), never below (1 - TV) / (1 + TV)).

Shapes: N rows of target logits, V target vocabulary, M single logits; R rows to draft for, W draft vocabulary, S drafts
of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.engine.logprobs import TokenLogprobs, logprob_columns, tell_logprobs
from eyas.kernels.noise import race
from eyas.sampling import IMPOSSIBLE, Sampling
from oracle.shaping import count_tokens, probabilities, shape_counted, shapes_logits

FAINT = 1e-20
"""Weight of siblings that top-k, top-p or min-p removed from q."""
HINDRANCE = 1e4
"""Subtracted from draft logits of tokens that a mask forbids; larger than any difference of logits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingMetadata:
    """Options, noise counters and context of a token to sample."""

    sampling: Sampling
    position: int
    """Absolute index of the token, a counter of the noise."""
    seed: int = 0
    """Seed of the request, within int64."""
    before: Sequence[int] = ()
    """All tokens before it, drafts included; used for penalties only."""
    prompt_length: int = 0
    """How many of them belong to the prompt."""
    banned: frozenset[int] = frozenset()
    """Tokens forbidden here, such as stop tokens before the minimum length."""
    mask_V: Tensor | None = None
    """Tokens allowed here by a grammar, on the host."""


def choose(logits_NV: Tensor, wanted: Sequence[SamplingMetadata]) -> Tensor:
    """The target's token of each row [N]; at least one token must be allowed."""
    assert len(wanted) == len(logits_NV), "one row for each wanted token"
    if _plainly_greedy(wanted):
        return logits_NV.argmax(dim=-1)
    token_N = torch.empty(len(wanted), dtype=torch.int64, device=logits_NV.device)
    for rows, group in _alike(wanted, logits_NV):
        token_N[rows] = _choose_alike(logits_NV[rows], group)
    return token_N


def _plainly_greedy(wanted: Sequence[SamplingMetadata]) -> bool:
    """Whether all rows are greedy without further options."""
    plain: Sampling | None = None
    for one in wanted:
        if one.sampling is not plain:
            if one.sampling.temperature != 0 or shapes_logits(one.sampling):
                return False
            plain = one.sampling
        if one.banned or one.mask_V is not None:
            return False
    return True


def _alike(
    wanted: Sequence[SamplingMetadata], logits_NV: Tensor
) -> Iterator[tuple[Tensor | slice, list[SamplingMetadata]]]:
    """Groups of rows with equal options, as an index with their metadata."""
    groups: dict[Sampling, list[int]] = {}
    for row, one in enumerate(wanted):
        groups.setdefault(one.sampling, []).append(row)
    for rows in groups.values():
        index = slice(None) if len(rows) == len(wanted) else torch.tensor(rows, device=logits_NV.device)
        yield index, [wanted[row] for row in rows]


def _choose_alike(logits_NV: Tensor, wanted: Sequence[SamplingMetadata]) -> Tensor:
    """`choose` for rows of one sampling."""
    sampling = wanted[0].sampling
    logits_NV = _forbid(_shape(logits_NV, wanted, sampling), wanted)
    if sampling.temperature == 0:
        return logits_NV.argmax(dim=-1)
    token_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    return race(probabilities(logits_NV, sampling), *_counters(wanted, logits_NV.device), token_V)[:, 0]


def _shape(logits_NV: Tensor, wanted: Sequence[SamplingMetadata], sampling: Sampling) -> Tensor:
    prompt_NV = output_NV = None
    if sampling.penalises:
        size, device = logits_NV.shape[-1], logits_NV.device
        prompt_NV = count_tokens([one.before[: one.prompt_length] for one in wanted], size, device)
        output_NV = count_tokens([one.before[one.prompt_length :] for one in wanted], size, device)
    return shape_counted(logits_NV, sampling, prompt_NV, output_NV)


def _forbid(logits_NV: Tensor, wanted: Sequence[SamplingMetadata]) -> Tensor:
    """Forbid banned and masked tokens, after all other options."""
    banned = [(row, token) for row, one in enumerate(wanted) for token in one.banned]
    masked = [row for row, one in enumerate(wanted) if one.mask_V is not None]
    if banned or masked:
        logits_NV = logits_NV.clone()
    if banned:
        row_M, token_M = torch.tensor(banned, device=logits_NV.device).T
        logits_NV[row_M, token_M] = IMPOSSIBLE
    if masked:
        row_M = torch.tensor(masked, device=logits_NV.device)
        allowed_MV = _masks([wanted[row] for row in masked], logits_NV.device)
        logits_NV[row_M] = logits_NV[row_M].masked_fill(~allowed_MV, IMPOSSIBLE)
    return logits_NV


def _masks(wanted: Sequence[SamplingMetadata], device: torch.device) -> Tensor:
    """Masks [M, V] of the rows that have one, on the device."""
    return torch.stack([one.mask_V for one in wanted if one.mask_V is not None]).to(device)


def _counters(wanted: Sequence[SamplingMetadata], device: torch.device) -> tuple[Tensor, Tensor]:
    seed_N, position_N = torch.tensor([[one.seed for one in wanted], [one.position for one in wanted]], device=device)
    return seed_N, position_N


def log_probabilities(logits_NV: Tensor, token_N: Tensor, alternatives: int) -> list[TokenLogprobs]:
    """Log probability and rank of each chosen token, with alternatives."""
    return tell_logprobs(token_N, logprob_columns(logits_NV, token_N, alternatives), alternatives)


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Drafts of rows [R], or siblings [R, S] with the most promising first."""

    index: Tensor
    """Indices in the draft vocabulary."""
    token: Tensor
    """Target ids."""
    confidence: Tensor
    """Softmax probability by the drafter."""

    @property
    def tokens(self) -> list[Any]:
        """Target ids on the host."""
        tokens: list[Any] = self.token.tolist()
        return tokens

    @property
    def confidences(self) -> list[Any]:
        """Confidences on the host."""
        confidences: list[Any] = self.confidence.tolist()
        return confidences


def draw(q_logits_RW: Tensor, wanted: Sequence[SamplingMetadata], token_W: Tensor) -> Drawn:
    """One draft for each row [R]; see `draw_many`."""
    drawn = draw_many(q_logits_RW, wanted, token_W, 1)
    return Drawn(index=drawn.index[:, 0], token=drawn.token[:, 0], confidence=drawn.confidence[:, 0])


def draw_many(q_logits_RW: Tensor, wanted: Sequence[SamplingMetadata], token_W: Tensor, width: int) -> Drawn:
    """Siblings for each row [R, width]; token_W are the target ids of the draft vocabulary, counters of the noise.

    A greedy request takes the largest logits, another one the first by q / E, where q has its temperature and its
    cuts. Penalties, bias and bans are left out: they are the target's affair, and a draft is only a guess at its token.
    Where they bite, the guess fails more often, which costs time and nothing else. A mask bites at every token, so it
    is heeded: what it forbids comes last.
    """
    assert len(wanted) == len(q_logits_RW), "one row for each wanted token"
    q_logits_RW = q_logits_RW.float()
    masked = [row for row, one in enumerate(wanted) if one.mask_V is not None]
    if masked:
        row_M = torch.tensor(masked, device=q_logits_RW.device)
        forbidden_MW = ~_masks([wanted[row] for row in masked], q_logits_RW.device)[:, token_W]
        # Not minus infinity: the mask may leave none of the draft vocabulary, and then there must still be a first.
        q_logits_RW = q_logits_RW.index_add(0, row_M, forbidden_MW.float(), alpha=-HINDRANCE)
    width = min(width, q_logits_RW.shape[-1])
    index_RS = torch.empty(len(wanted), width, dtype=torch.int64, device=q_logits_RW.device)
    for rows, group in _alike(wanted, q_logits_RW):
        index_RS[rows] = _draw_alike(q_logits_RW[rows], group, token_W, width)
    logits_RS = q_logits_RW.gather(-1, index_RS)
    confidence_RS = (logits_RS - q_logits_RW.logsumexp(dim=-1, keepdim=True)).exp()
    return Drawn(index=index_RS, token=token_W[index_RS], confidence=confidence_RS)


def _draw_alike(q_logits_RW: Tensor, wanted: Sequence[SamplingMetadata], token_W: Tensor, width: int) -> Tensor:
    """`draw_many` for rows of one sampling."""
    sampling = wanted[0].sampling
    if sampling.temperature == 0:
        return q_logits_RW.topk(width, dim=-1).indices if width > 1 else q_logits_RW.argmax(dim=-1, keepdim=True)
    q_RW = probabilities(q_logits_RW, sampling)
    if width > 1:
        # The cuts may leave fewer than there are siblings; then those come that they took out, by their own race.
        q_RW = q_RW + FAINT * q_logits_RW.softmax(dim=-1)
    return race(q_RW, *_counters(wanted, q_RW.device), token_W, width=width)
