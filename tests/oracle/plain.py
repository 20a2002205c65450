"""Plain decoding by transformers: the baseline, and what answers when there is no drafter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, TextStreamer

from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.rejection import require_unshaped


class _TextSink(TextStreamer):
    """Hands finished pieces of text on instead of printing them."""

    def __init__(self, target: Target, sink: Callable[[str], None]) -> None:
        super().__init__(target.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._sink = sink

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers whenever some text can no longer change."""
        self._sink(text)


@torch.inference_mode()
def generate_plainly(
    target: Target,
    ids: Sequence[int],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> tuple[int, ...]:
    """New tokens, the stop token included; text is handed to `on_text` as it comes."""
    require_unshaped(sampling, "decoding by transformers")
    if sampling.min_p:
        raise UserError(f"min_p {sampling.min_p}: transformers applies it after top_p, not before; use the engine")
    ids_BT = torch.tensor([ids], device=target.device)
    options: dict[str, object] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if sampling.temperature > 0:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    stop_ids = sorted(target.stop_ids())
    with torch.random.fork_rng(), _without_shipped_defaults(target.model):
        torch.manual_seed(seed)
        generate: Any = target.model.generate  # transformers types it as a tensor
        output_BT = generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=max_new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=0,
            streamer=None if on_text is None else _TextSink(target, on_text),
            **options,
        )
    return tuple(output_BT[0, len(ids) :].tolist())


@contextmanager
def _without_shipped_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Decode by `Sampling` alone: transformers would add the checkpoint's defaults, such as a repetition penalty."""
    shipped = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = shipped
