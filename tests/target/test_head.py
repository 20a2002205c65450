"""The head on its own says what the target says, for every kind of target, or is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from each import each
from eyas.errors import UserError
from eyas.target.facts import facts_of
from eyas.target.head import TargetHead, read_head
from eyas.target.model import Target
from target.test_capture import FAMILIES, some_ids, tiny

SCALED: dict[str, dict[str, float]] = {
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 3.0},
}


@torch.no_grad()
def target_of(family: str) -> Target:
    """Scores of some size; biases and norms that are not the ones models are born with; a scale where there is one."""
    model = tiny(family)
    model.get_output_embeddings().weight.mul_(20)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for key, value in SCALED.get(family, {}).items():
        setattr(model.config, key, value)
        if hasattr(model, key):  # Cohere keeps a copy
            setattr(model, key, value)
    return Target(
        facts=facts_of(model.config, family), model=model.requires_grad_(False), tokenizer=PreTrainedTokenizerBase()
    )


def states_and_scores(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    model: Any = target.model
    with torch.no_grad():
        states = model.get_decoder()(input_ids=some_ids(), use_cache=False).last_hidden_state[0]
        return states, model(input_ids=some_ids(), use_cache=False).logits[0]


@each("family", [*FAMILIES, "granite", "cohere"])
def test_the_head_gives_the_targets_own_scores(family: str) -> None:
    target = target_of(family)
    states, theirs = states_and_scores(target)
    head = read_head(target)
    torch.testing.assert_close(head.scores(states), theirs, rtol=1e-5, atol=1e-5)
    chosen = torch.tensor([3, 7, 79])
    torch.testing.assert_close(head.only(chosen).scores(states), theirs[:, chosen], rtol=1e-5, atol=1e-5)


@each(
    ("family", "without"),
    [("granite", {"scale": 1.0}), ("cohere", {"scale": 1.0}), ("gemma2", {"cap": None}), ("phi", {"bias_V": None})],
)
def test_what_stands_behind_the_matrix_matters(family: str, without: dict[str, Any]) -> None:
    target = target_of(family)
    states, theirs = states_and_scores(target)
    poorer: TargetHead = replace(read_head(target), **without)
    assert float((poorer.scores(states) - theirs).abs().max()) > 0.02 * float(theirs.abs().max())


def test_a_target_whose_scores_are_something_else_is_refused() -> None:
    target = target_of("llama")
    target.model.config.logit_scale = 2.0  # said, and not done
    with pytest.raises(UserError, match=r"scores of llama \(llama\) are not its head.*differ by .* not supported"):
        read_head(target)
    del target.model.config.logit_scale
    read_head(target)

    def sharpen(module: object, args: object, output: Any) -> Any:
        output.logits = output.logits * float("nan")
        return output

    hook = target.model.register_forward_hook(sharpen)
    with pytest.raises(UserError, match="not supported for training"):
        read_head(target)
    hook.remove()
