"""How fast a drafter trains, and how much of that is the target: random weights of a given shape, random text.

    python benchmarks/train_speed.py --shape 8b --documents 8 --length 4096 --compile

The target's forward pass is the floor: training with live features cannot be faster. Printed are tokens/s of both, the
ratio, and the most memory in use. Needs a CUDA device for shapes of a size that matters.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.train.batch import TrainingBatch
from eyas.train.init import config_for, init_drafter
from eyas.train.recipe import DrafterSettings, TrainSettings
from eyas.train.sources.live import LiveSource
from eyas.train.state import TrainState

SHAPES = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}


def random_target(shape: str, device: str) -> Target:
    """A target of that shape that knows nothing."""
    config = LlamaConfig(max_position_embeddings=131072, **SHAPES[shape])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    return Target(facts=facts_of(config, shape), model=model, tokenizer=PreTrainedTokenizerBase())


def random_batch(documents: int, length: int, vocab_size: int, device: str) -> TrainingBatch:
    """Documents of one length, the last three quarters of each an answer."""
    total = documents * length
    position = np.tile(np.arange(length), documents)
    return TrainingBatch.build(
        ids=np.random.default_rng(0).integers(0, vocab_size, total),
        mask=position >= length // 4,
        position=position,
        starts=np.arange(documents + 1) * length,
        device=device,
    )


def seconds(run: Callable[[], object], repeats: int, device: str) -> float:
    """Median time of one run, the first ones left out."""
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times[2:]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--draft-vocab", type=int, default=None)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--activation-checkpointing", action="store_true")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = random_target(arguments.shape, device)
    batch = random_batch(arguments.documents, arguments.length, target.facts.vocab_size, device)
    source = LiveSource(target, target.facts.default_aux_layer_ids(), compiled=arguments.compile, chunk=arguments.chunk)
    kept = torch.arange(arguments.draft_vocab or min(32000, target.facts.vocab_size))
    config = config_for(
        target, DrafterSettings(draft_vocab_size=len(kept)), dtype="bfloat16" if device == "cuda" else "float32"
    )
    settings = TrainSettings(
        depths=arguments.depths,
        lr=1e-4,
        chunk=arguments.chunk,
        activation_checkpointing=arguments.activation_checkpointing,
        compile=arguments.compile,
    )
    state = TrainState("drafter", init_drafter(target, config, kept, seed=0), settings)
    counts = batch.counts(arguments.depths)

    def forward() -> object:
        return source(batch)

    def step() -> None:
        state.backward(batch, source(batch), counts)
        state.optimizer_step(state.gradient_norm(), 1.0)

    floor = seconds(forward, arguments.repeats, device)
    whole = seconds(step, arguments.repeats, device)
    tokens = arguments.documents * arguments.length
    print(
        json.dumps(
            {
                **vars(arguments),
                "tokens": tokens,
                "target_seconds": floor,
                "step_seconds": whole,
                "target_tokens_per_second": tokens / floor,
                "training_tokens_per_second": tokens / whole,
                "share_of_the_floor": floor / whole,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
