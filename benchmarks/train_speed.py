"""Measures training speed of a drafter relative to the target's forward pass, with random models and text.

    python benchmarks/train_speed.py --shape 8b --documents 8 --length 4096 --taught 0.53 --compile

The target's forward pass is the floor: training with live features cannot be faster. Printed are tokens/s of both, the
ratio, the ratio that counting multiplications promises, and the most memory in use. Needs a CUDA device for shapes of a
size that matters.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from eyas.drafter.config import DrafterConfig
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.parts import TargetParts
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

BATCHES = 3


def random_target(shape: str, device: str) -> Target:
    """A random target of this shape."""
    config = LlamaConfig(max_position_embeddings=131072, **SHAPES[shape])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    return Target(facts=facts_of(config, shape), model=model, tokenizer=PreTrainedTokenizerBase())


def random_batches(documents: int, length: int, taught: float, vocab_size: int, device: str) -> list[TrainingBatch]:
    """Documents of one length that end in an answer, whose share varies."""
    generator = np.random.default_rng(0)
    total = documents * length
    position = np.tile(np.arange(length), documents)
    spread = min(taught, 1 - taught) / 2
    batches = []
    for _ in range(BATCHES):
        share = np.linspace(taught - spread, taught + spread, documents) if documents > 1 else np.array([taught])
        # A few tokens more or less, so that no two batches teach the same number.
        answer = np.clip(share * length + generator.integers(-8, 9, documents), 0, length)
        batches.append(
            TrainingBatch.build(
                ids=generator.integers(0, vocab_size, total),
                mask=position >= np.repeat(length - answer, length),
                position=position,
                starts=np.arange(documents + 1) * length,
                device=device,
            )
        )
    return batches


def multiplications(batch: TrainingBatch, config: LlamaConfig, drafter: DrafterConfig, depths: int) -> tuple[int, int]:
    """FLOPs of the target's pass over a batch, and of the drafter's step on it; a backward pass counts twice."""
    slots, taught, read = len(batch.ids_T), len(batch.row_M), len(batch.slots.read_R)
    keys, queries = (np.diff(starts.tolist()) for starts in (batch.slots.key_starts, batch.slots.query_starts))
    documents = np.diff(batch.starts.tolist())

    def layer(size: int, inputs: int, heads: int, key_heads: int, head_dim: int, intermediate: int) -> tuple[int, int]:
        """FLOPs of a slot: for keys and values, and for the rest."""
        return 2 * inputs * key_heads * head_dim, (inputs + size) * heads * head_dim + 3 * size * intermediate

    size, wide = config.hidden_size, config.num_attention_heads * config.head_dim
    remembered, rest = layer(
        size, size, config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size
    )
    # Two products, scores and values, for every pair of a query and a key it sees.
    target = config.num_hidden_layers * (slots * (remembered + rest) + int((documents**2).sum()) * wide)
    target += taught * size * config.vocab_size

    size, wide = drafter.hidden_size, drafter.num_attention_heads * drafter.head_dim
    remembered, rest = layer(
        size,
        2 * size,
        drafter.num_attention_heads,
        drafter.num_key_value_heads,
        drafter.head_dim,
        drafter.intermediate_size,
    )
    pairs = int((keys**2 - (keys - queries) ** 2).sum()) // 2
    forward = slots * drafter.num_aux_hidden_states * drafter.target_hidden_size * size + read * remembered
    forward += (depths - 1) * taught * remembered + depths * taught * (rest + size * drafter.draft_vocab_size)
    # Flash attention computes scores again: five products on the way back, two on the way there.
    attention = depths * pairs * wide * 7
    return target, 3 * forward + attention + taught * config.hidden_size * drafter.draft_vocab_size


def seconds(run: Callable[[TrainingBatch], object], batches: list[TrainingBatch], repeats: int) -> float:
    """Median time of a run, after a warm-up over every batch."""
    times = []
    for number in range(len(batches) + repeats):
        if batches[0].ids_T.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        run(batches[number % len(batches)])
        if batches[0].ids_T.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times[len(batches) :]))


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--taught", type=float, default=0.75, help="share of the tokens that are an answer's")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--draft-vocab", type=int, default=None)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--activation-checkpointing", action="store_true")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = random_target(arguments.shape, device)
    batches = random_batches(arguments.documents, arguments.length, arguments.taught, target.facts.vocab_size, device)
    source = LiveSource(target, target.facts.default_aux_layer_ids(), compiled=arguments.compile, chunk=arguments.chunk)
    kept = torch.arange(arguments.draft_vocab or min(32000, target.facts.vocab_size))
    parts = TargetParts.of(target)
    config = config_for(
        parts, DrafterSettings(draft_vocab_size=len(kept)), dtype="bfloat16" if device == "cuda" else "float32"
    )
    settings = TrainSettings(
        depths=arguments.depths,
        lr=1e-4,
        chunk=arguments.chunk,
        activation_checkpointing=arguments.activation_checkpointing,
        compile=arguments.compile,
    )
    state = TrainState("drafter", init_drafter(parts, config, kept, seed=0), settings)

    def step(batch: TrainingBatch) -> None:
        state.backward(batch, source(batch), batch.counts(arguments.depths))
        state.optimizer_step(state.gradient_norm(), 1.0)

    floor = seconds(source, batches, arguments.repeats)
    whole = seconds(step, batches, arguments.repeats)
    of_target, of_drafter = multiplications(batches[0], target.model.config, config, arguments.depths)
    tokens = arguments.documents * arguments.length
    print(
        json.dumps(
            {
                **vars(arguments),
                "tokens": tokens,
                "slots_that_teach": [len(batch.row_M) for batch in batches],
                "target_seconds": floor,
                "step_seconds": whole,
                "target_tokens_per_second": tokens / floor,
                "training_tokens_per_second": tokens / whole,
                "share_of_the_floor": floor / whole,
                "share_by_count": of_target / (of_target + of_drafter),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
