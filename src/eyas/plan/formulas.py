"""Formulas of a forecast's figures, with their numbers put in."""

from dataclasses import fields

from eyas.drafter.cost import BYTES_PER_ELEMENT
from eyas.plan.footprint import CUDA_RUNTIME, FLOAT32, drafter_bits
from eyas.plan.forecast import SPARE, Forecast
from eyas.plan.kv_cache_dtype import kv_element
from eyas.plan.memory import blocks_of
from eyas.plan.roofline import Speed, Work
from eyas.plan.training import trained_weights


def formulas(forecast: Forecast) -> dict[str, str]:
    """Formulas by the keys of the record and of its memory; speeds are for the asked number of users.

    `step` is their plain step, `drafting_step` the one at the recommended depth.
    """
    deployment = forecast.deployment
    decoder, kept, cards = deployment.decoder, deployment.quantisation, deployment.cards
    divided = f" / {cards} cards" if cards > 1 else ""
    element = 8 * kept.other_bytes
    bits = f"{kept.bits:.4g}" if kept.expert_bits is None else f"{kept.bits:.4g} ({kept.expert_bits:.4g} of experts)"
    twice = deployment.card.device == "cpu" and kept.name == "float32"  # a tied head takes memory twice
    tables = kept.vocabulary_bytes(decoder.vocabulary, tied=decoder.tied and not twice)
    texts = {
        "weights": f"({decoder.matrices:,} weights x {bits} bits + {tables:,.0f} bytes of embedding and head)"
        f"{divided} + {decoder.vectors:,} x {element} bits",
        "kv_per_token": f"{len(decoder.layers)} layers x {_kept(forecast)} x "
        f"{kv_element(deployment.kv_cache_dtype, kept.other_bytes)} bytes",
    }
    drafter = deployment.drafter
    if drafter is not None:
        config, packed = drafter.config, drafter_bits(drafter, kept)
        weights = sum(trained_weights(drafter).values())
        each = f"{packed:.3g} bits" if packed is not None else f"{8 * BYTES_PER_ELEMENT[kept.dtype]} bits"
        by_head = f"2 x {-(-config.num_key_value_heads // cards)} heads x {config.head_dim}"
        kept_numbers = by_head if config.mla is None else f"{config.cached.numbers} of the latent"
        texts["drafter"] = f"{weights:,} weights x {each}{divided}, embedding and head as far as they are its own"
        texts["drafter_kv_per_token"] = (
            f"{config.num_hidden_layers} layers x {kept_numbers} x "
            f"{kv_element(deployment.kv_cache_dtype, kept.other_bytes)} bytes"
        )
    return texts | _room(forecast) | _speeds(forecast)


def _room(forecast: Forecast) -> dict[str, str]:
    """Formulas of activations, buffers and users that fit."""
    deployment, taken, room = forecast.deployment, forecast.footprint, forecast.deployment.room
    decoder, cards, element = deployment.decoder, deployment.cards, deployment.quantisation.other_bytes
    config = None if deployment.drafter is None else deployment.drafter.config
    states = 0 if config is None else config.num_aux_hidden_states * config.target_hidden_size
    heads, inner = decoder.heads * decoder.head_dim // cards, decoder.intermediate_size // cards
    widest = f"4 x {heads:,} of heads" if 4 * heads > 3 * inner else f"3 x {inner:,} of gates"
    on_gpu = deployment.card.device != "cpu"
    once = (
        f"{room.max_num_batched_tokens:,} tokens x (4 x {decoder.hidden_size:,} + {widest} + {states:,} of states) x "
        f"{element} bytes + {room.recorded_tokens:,} tokens x {decoder.vocab_size:,} logits x ({element} + {FLOAT32}) "
        "bytes"
    )
    block = f"{room.block_size} tokens x {taken.per_token:,} bytes"
    each, left = blocks_of(deployment.context, room.block_size), max(0, forecast.for_blocks)
    texts = {
        "working": f"2 x ({once})" if on_gpu else once,
        "needed": f"{taken.beside_blocks:,} bytes beside blocks + ({deployment.users} users x {each:,} + 1) blocks x "
        f"{block}",
        "usable": f"{deployment.card.memory:,} bytes x {1 - SPARE:g}",
        "left_for_kv_blocks": f"{deployment.usable:,} usable - {taken.beside_blocks:,} bytes beside blocks - {block}",
        "users_fit": f"{left:,} bytes left / ({each:,} blocks x {block})",
        "longest_context": f"({left:,} bytes left / {deployment.users} users / ({block}) - 1) blocks x "
        f"{room.block_size} tokens" + ("" if decoder.context is None else f", at most {decoder.context:,}"),
    }
    rows, tokens = room.recorded_rows, max(room.recorded_tokens, room.recorded_rows)
    texts["recorded"] = (
        f"({tokens:,} + 1) tokens x {decoder.vocab_size:,} logits x {FLOAT32} bytes + ({rows:,} + 1) requests x "
        f"{room.ring(states * element, padded=on_gpu)} positions x {states:,} of states x {element} bytes"
    )
    if on_gpu:
        texts["runtime"] = f"{CUDA_RUNTIME:,} bytes, assumed: context and libraries of the device"
    return texts


def _speeds(forecast: Forecast) -> dict[str, str]:
    """Formulas of step times and speeds."""
    deployment, best = forecast.deployment, forecast.best
    pair, speed, users, half = deployment.pair, deployment.speed, deployment.users, deployment.context / 2
    factors = speed.factors
    prompt = pair.prefill(deployment.context // 2, deployment.room.max_num_batched_tokens)
    total = Work(**{part.name: sum(getattr(work, part.name) for work in prompt) for part in fields(Work)})
    texts = {
        "step": _step(pair.verify(rows=users, tokens=users, context=half), speed, factors.verify.at(users)),
        "tokens_per_second": f"{users} users x {best.length:.4g} tokens / {best.step_seconds * 1e3:.4g} ms",
        "prompt_seconds": f"{len(prompt)} passes over chunks of {deployment.room.max_num_batched_tokens:,} tokens, "
        f"together {_step(total, speed)}",
    }
    if best.depth:
        gained, depth = deployment.profile.survivals(best.depth), best.depth
        verify = pair.verify(rows=users, tokens=users * (1 + depth), context=half)
        # The drafter's first pass reads the tokens of the last round.
        tokens = users * (1 + sum(gained)) + users * (depth - 1)
        draft = pair.draft(rows=users, passes=depth, tokens=tokens, context=half)
        plain = next(one for one in forecast.table if (one.users, one.depth) == (users, 0))
        texts["length"] = " + ".join(["1", *(f"{share:.4f}" for share in gained)])
        texts["drafting_step"] = (
            f"{users} x {1 + depth} tokens verified: {_step(verify, speed, factors.verify.at(users * (1 + depth)))}; "
            f"and {depth} passes of the drafter: {_step(draft, speed)}"
        )
        if factors.first_draft.points:
            first, further = factors.first_draft.at(users), factors.further_drafts.at(users)
            texts["drafting_step"] += (
                f", times {first:.3g} of the first of them and {further:.3g} of the others, measured"
            )
        texts["speedup"] = f"{best.tokens_per_second:,.2f} / {plain.tokens_per_second:,.2f} tokens/s"
    return texts


def _kept(forecast: Forecast) -> str:
    decoder, cards = forecast.deployment.decoder, forecast.deployment.cards
    if decoder.latent:
        return f"({decoder.latent - decoder.rotated} + {decoder.rotated}) of the latent, on every card"
    return f"2 x {-(-decoder.kv_heads // cards)} heads x {decoder.head_dim}"


def _step(work: Work, speed: Speed, factor: float = 1.0) -> str:
    moving, computing = work.bytes * speed.byte, work.flops * speed.flop
    moved = f"{work.bytes / 1e9:,.2f} GB / {1e-9 / speed.byte:,.0f} GB/s ({moving * 1e3:,.2f} ms)"
    computed = f"{work.flops / 1e12:,.3g} T operations / {1e-12 / speed.flop:,.3g} TFLOPS ({computing * 1e3:,.2f} ms)"
    both = f"{moved} + {computed}"
    if speed.overlap != 1:
        both = f"{moved} and {computed}, overlapping by p = {speed.overlap:g},"
    text = (
        f"{both} + {work.layers:g} layers x {speed.layer * 1e6:,.0f} us + {work.passes:g} x {speed.pass_ * 1e6:,.0f} us"
    )
    if work.sums:
        text += (
            f" + {work.sums:g} sums x {speed.sum_ * 1e6:,.0f} us + {work.summed / 1e6:,.1f} MB summed at "
            f"{1e-9 / speed.summed_byte:,.0f} GB/s"
        )
    return text if factor == 1.0 else f"({text}) x {factor:.3g} as measured"
