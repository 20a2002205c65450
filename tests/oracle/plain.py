"""Greedy decoding by transformers, as a baseline."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from eyas.target.model import Target


@torch.inference_mode()
def generate_plainly(target: Target, ids: Sequence[int], *, max_new_tokens: int) -> tuple[int, ...]:
    """New tokens, the stop token included."""
    ids_BT = torch.tensor([ids], device=target.device)
    generate: Any = target.model.generate  # transformers types it as a tensor
    shipped = target.model.generation_config
    # transformers would add the checkpoint's defaults, such as a repetition penalty.
    target.model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        output_BT = generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(target.stop_ids()),
            pad_token_id=0,
        )
    finally:
        target.model.generation_config = shipped
    return tuple(output_BT[0, len(ids) :].tolist())
