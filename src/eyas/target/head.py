"""The target's language-model head on its own, so that scores are made for the rows and tokens that are needed.

A vocabulary has a hundred thousand entries and a training batch tens of thousands of tokens: the whole table of scores
never exists. Some architectures do something to the scores behind the matrix (Gemma caps them, Granite and Cohere scale
them); `read_head` knows those and proves it on a few tokens, so that an architecture with a trick of its own is refused
instead of taught wrongly.

Shapes: T tokens, D hidden size, V vocabulary, C chosen tokens of the vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

from eyas.errors import UserError
from eyas.target.model import Target


@dataclass(frozen=True, kw_only=True)
class TargetHead:
    """Turns final states (behind the last norm) into scores."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    cap: float | None

    def scores(self, hidden_TD: Tensor) -> Tensor:
        """Scores [T, V], in the type of the states."""
        scores_TV = functional.linear(hidden_TD, self.weight_VD, self.bias_V)
        if self.scale != 1.0:
            scores_TV = scores_TV * self.scale
        return scores_TV if self.cap is None else torch.tanh(scores_TV / self.cap) * self.cap

    def only(self, ids_C: Tensor) -> "TargetHead":
        """The same head over some tokens of the vocabulary."""
        ids_C = ids_C.to(self.weight_VD.device)
        return replace(
            self, weight_VD=self.weight_VD[ids_C], bias_V=None if self.bias_V is None else self.bias_V[ids_C]
        )


def score_scale(config: PretrainedConfig) -> float:
    """What a text model multiplies its scores with: Cohere's logit_scale, or one through Granite's logits_scaling."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    return scale / float(getattr(config, "logits_scaling", None) or 1.0)


def head_of(target: Target) -> TargetHead:
    """The head of a target, by what its configuration says."""
    config = target.model.config.get_text_config()
    module = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return TargetHead(
        weight_VD=target.head().to(target.device),
        bias_V=None if getattr(module, "bias", None) is None else module.bias.detach().to(target.device),
        scale=score_scale(config),
        cap=getattr(config, "final_logit_softcapping", None),
    )


@torch.no_grad()
def read_head(target: Target) -> TargetHead:
    """The head of a target, checked against the target's own scores."""
    head = head_of(target)
    ids_BT = torch.arange(8, device=target.device)[None] % target.facts.vocab_size
    theirs = target.model(input_ids=ids_BT, use_cache=False).logits[0].float().to(target.device)
    decoder = target.model.get_decoder()  # type: ignore[no-untyped-call]
    state_TD = decoder(input_ids=ids_BT, use_cache=False).last_hidden_state[0].to(target.device)
    ours = head.scores(state_TD).float()
    error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not error <= 0.02 * size:
        raise UserError(
            f"the scores of {target.facts.source} ({target.facts.model_type}) are not its head times its last state: "
            f"they differ by {error:.3g} where the largest is {size:.3g}; such a target is not supported for training"
        )
    return head
