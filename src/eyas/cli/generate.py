"""`eyas generate`: answer a prompt, plainly or with a drafter."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.options import AsJson, Cache, report

if TYPE_CHECKING:
    from eyas.engine.reference import Generation
    from eyas.sampling import Sampling
    from eyas.target.model import Target


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    target: Annotated[str, typer.Option(help="smollm2, a GGUF file, a folder or a hub id.")] = "smollm2",
    drafter: Annotated[str | None, typer.Option(help="A drafter's folder or hub id: decode with speculation.")] = None,
    depth: Annotated[int, typer.Option(help="Tokens to draft per round.", min=0)] = 3,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")] = "auto",
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")] = "cpu",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Answer a prompt through the target's chat template.

    With --drafter this is the reference decoder: exact and simple, not fast.
    """
    from eyas.sampling import Sampling
    from eyas.target.model import Target

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = Target.load(target, dtype=dtype, device=device, cache=cache, report=report)
    ids = loaded.encode_chat([{"role": "user", "content": text}])
    started = time.perf_counter()
    speculation: Generation | None = None
    if drafter is None:
        from eyas.engine.plain import generate_plainly

        stream = None if as_json else _write_text
        tokens = generate_plainly(loaded, ids, sampling=sampling, max_new_tokens=max_tokens, seed=seed, on_text=stream)
    else:
        speculation = _speculate(loaded, drafter, ids, sampling, depth=depth, max_tokens=max_tokens, seed=seed)
        tokens = speculation.tokens
        if not as_json:
            _write_text(loaded.decode(tokens))
    seconds = time.perf_counter() - started
    if as_json:
        result = {
            "target": target,
            "drafter": drafter,
            "prompt_tokens": len(ids),
            "tokens": len(tokens),
            "seconds": seconds,
            "answer": loaded.decode(tokens),
        }
        if speculation is not None:
            result |= {"acceptance_length": speculation.acceptance_length, "drafts": len(speculation.rounds)}
        typer.echo(json.dumps(result))
        return
    typer.echo()
    line = f"[{target}: {len(tokens)} tokens in {seconds:.1f} s, {len(tokens) / seconds:.1f} tokens/s"
    if speculation is not None:
        line += f"; {Path(drafter or '').name}: acceptance length {speculation.acceptance_length:.2f} at depth {depth}"
    report(line + "]")


def _speculate(
    target: "Target", drafter: str, ids: list[int], sampling: "Sampling", *, depth: int, max_tokens: int, seed: int
) -> "Generation":
    from eyas.drafter.checkpoint import load_drafter
    from eyas.engine.dense import DenseTarget, EagleDraft
    from eyas.engine.reference import Chain, decode_speculatively
    from eyas.sampling import SeededDraws

    model = load_drafter(drafter).to(device=target.device, dtype=target.dtype)
    model.share_target(target.embedding(), target.head())
    return decode_speculatively(
        DenseTarget(target, model.config),
        EagleDraft(model),
        ids,
        shape=Chain(depth=depth),
        draws=SeededDraws(seed),
        max_new_tokens=max_tokens,
        sampling=sampling,
        stop_ids=target.stop_ids(),
    )


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
