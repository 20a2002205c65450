"""Measures prefill and batched decoding on random prompts, as `llama-batched-bench` does.

    python benchmarks/batched_speed.py model.gguf --users 1 --users 4 --users 16
    llama-batched-bench -m model.gguf -c 8192 -npp 128 -ntg 96 -npl 1,4,16 -t 2 -tb 2

On a CPU. Both read prompts of random tokens and decode greedily to the end, without drafts. Tokens per second of the
steps that read prompts and of those that only decode, the best of the rounds and all of them. On a processor with AMX,
`--without-amx` shows what it gives.
"""

import argparse
import random
import time

from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.errors import UserError
from eyas.kernels.linear.quantised_linear import load_quantised
from eyas.loading import load_target
from eyas.sampling import Sampling


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--users", type=int, action="append", help="default 1, 4, 16")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--without-amx", action="store_true", help="integer products by vectors alone")
    arguments = parser.parse_args()
    users = arguments.users or [1, 4, 16]
    try:
        target = load_target(arguments.target, dtype=arguments.dtype, device="cpu", quantization=arguments.quantization)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    kernel, words = load_quantised()
    if kernel is not None:
        if arguments.without_amx:
            kernel.use_tiles(False)
        words = kernel.uses
    print(f"integer products, where the target has any: {words}")
    length = arguments.prompt + arguments.new
    config = EngineConfig(max_num_seqs=max(users), max_model_len=length, prefix_cache=False)
    engine, source, vocabulary = Engine(target, config=config), random.Random(0), target.facts.vocab_size
    read: dict[int, list[float]] = {count: [] for count in users}
    decoded: dict[int, list[float]] = {count: [] for count in users}
    for _ in range(arguments.rounds):
        for count in users:
            for _ in range(count):
                prompt = tuple(source.randrange(vocabulary) for _ in range(arguments.prompt))
                engine.submit(
                    Request(
                        prompt=prompt,
                        sampling=Sampling(),
                        max_new_tokens=arguments.new,
                        speculation=Speculation(mode="off"),
                    )
                )
            reading, decoding, tokens = _run(engine)
            read[count].append(count * arguments.prompt / reading)
            decoded[count].append(tokens / decoding)
    for count in users:
        rounds = ", ".join(f"{speed:.0f}" for speed in decoded[count])
        print(f"{count:>3} users  prompts {max(read[count]):7.1f}  decoding {max(decoded[count]):7.1f}  all: {rounds}")


def _run(engine: Engine) -> tuple[float, float, int]:
    """Seconds of prefill steps and of decoding steps, and the tokens of the latter."""
    reading, decoding, tokens = 0.0, 0.0, 0
    while engine.busy:
        reads = engine.scheduler.waiting > 0 or any(seq.pending > 1 for seq in engine.scheduler.running)
        began = time.perf_counter()
        pieces = engine.step()
        seconds = time.perf_counter() - began
        if reads:
            reading += seconds
        else:
            decoding += seconds
            tokens += sum(len(piece.tokens) for piece in pieces)
    return reading, decoding, tokens


if __name__ == "__main__":
    main()
