"""Does the fusion say what the drafter expects of it: evidence on which side of the layer a fault lies.

Training feeds the layer both: at depth 1 the fused state of the target, behind it the drafter's own. So the state that
a drafter makes at one place resembles the fused state of the next place, which it stands for, more than that of any
other. Where it does not, what comes in is not what the drafter was trained on: layers, order or weights of the fusion,
or the target. A fault behind the layer (the vocabulary, say) leaves the agreement as it was.

Shapes: T slots, R rounds, D drafter hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eyas.doctor.rounds import round_starts
from eyas.doctor.transcripts import Transcript
from eyas.drafter.model import Drafter, FirstLayer
from eyas.drafter.round_attention import RoundAttention


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Mean cosines behind the layer's own norm of hidden states."""

    own: float
    """Between a fed-back state and the fused state it stands for."""
    others: float
    """Between a fed-back state and the fused states of other places."""

    @property
    def gap(self) -> float:
        """What the right place has ahead of others."""
        return self.own - self.others


@torch.inference_mode()
def measure_agreement(drafter: Drafter, transcripts: Sequence[Transcript], aux: Sequence[Tensor]) -> Agreement:
    """Over all places of these transcripts, whose auxiliary states [T, X] are `aux`."""
    given, made = [], []
    for transcript, aux_TX in zip(transcripts, aux, strict=True):
        starts = round_starts(transcript)
        if len(starts) < 2:
            continue
        slots, device = starts[-1] + 1, aux_TX.device
        start_R = torch.tensor(list(starts), device=device)
        attention = RoundAttention(start_R)
        attention.depth = 1
        fused_TD = drafter.fuse(aux_TX[:slots].to(drafter.fc.weight.dtype))
        tokens_T = torch.tensor(transcript.ids[1 : slots + 1], device=device)
        output = drafter.step(fused_TD, tokens_T, torch.arange(slots, device=device), attention)
        given.append(fused_TD[start_R[1:]])
        made.append(output.feedback[start_R[:-1]])
    if not given:
        return Agreement(own=float("nan"), others=float("nan"))
    layer = drafter.layers[0]
    assert isinstance(layer, FirstLayer)
    norm = layer.hidden_norm
    fused_RD, fed_RD = norm(torch.cat(given)).float(), norm(torch.cat(made)).float()
    # Half the places further on: another word of another sentence.
    other_RD = fused_RD.roll(len(fused_RD) // 2, dims=0)
    return Agreement(own=_cosine(fed_RD, fused_RD), others=_cosine(fed_RD, other_RD))


def _cosine(one_RD: Tensor, other_RD: Tensor) -> float:
    return float(functional.cosine_similarity(one_RD, other_RD, dim=-1).mean())
