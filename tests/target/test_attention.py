"""A target attends through the callable that it is given; what the callable could not know of is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from each import each
from eyas.errors import UserError
from eyas.target.attention import attend_for_transformers, attending_through
from target.test_head import target_of


def test_every_layer_asks_the_callable_and_the_model_is_left_as_it_was() -> None:
    model: Any = target_of("llama").model
    before, asked = model.config._attn_implementation, list[int]()

    def nothing(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        asked.append(module.layer_idx)
        assert q.shape[0] == k.shape[0] == v.shape[0] == 3
        return torch.zeros_like(q)

    with attending_through(model):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, eyas_attend=nothing)
    assert asked == list(range(model.config.num_hidden_layers))
    assert model.config._attn_implementation == before


@each(
    ("given", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "a mask of its own"),
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "a bias of positions"),
        ({"s_aux": torch.zeros(3)}, "sinks"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Tensor], message: str) -> None:
    x = torch.zeros(1, 2, 3, 8)
    arguments: dict[str, Any] = {"attention_mask": None, "eyas_attend": lambda *_: x[0], **given}
    with pytest.raises(UserError, match=f"Linear attends with {message}"):
        attend_for_transformers(torch.nn.Linear(1, 1), x, x, x, **arguments)


def test_a_layer_that_is_told_by_nobody_is_refused() -> None:
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UserError, match="Linear does not hand its attention what the caller passed"):
        attend_for_transformers(torch.nn.Linear(1, 1), x, x, x, None)
