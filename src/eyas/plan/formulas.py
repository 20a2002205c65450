"""How the figures of a forecast came about, with their numbers put in."""

from eyas.drafter.cost import BYTES_PER_ELEMENT
from eyas.plan.footprint import drafter_bits
from eyas.plan.forecast import Forecast
from eyas.plan.kv_cache_dtype import kv_element
from eyas.plan.roofline import Speed, Work
from eyas.plan.training import trained_weights


def formulas(forecast: Forecast) -> dict[str, str]:
    """By the keys of the record's memory, and `step`, the plain step of the users that were asked for."""
    deployment = forecast.deployment
    decoder, kept, cards = deployment.decoder, deployment.quantisation, deployment.cards
    divided = f" / {cards} cards" if cards > 1 else ""
    element = 8 * kept.other_bytes
    bits = f"{kept.bits:.4g}" if kept.expert_bits is None else f"{kept.bits:.4g} ({kept.expert_bits:.4g} of experts)"
    tables = 1 if decoder.tied else 2
    said = {
        "weights": f"({decoder.matrices:,} weights x {bits} bits + {tables} x {decoder.vocabulary:,} of the vocabulary)"
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
        said["drafter"] = f"{weights:,} weights x {each}{divided}, embedding and head as far as they are its own"
        said["drafter_kv_per_token"] = f"{config.num_hidden_layers} layers x {kept_numbers}"
    work = deployment.pair.verify(rows=deployment.users, tokens=deployment.users, context=deployment.context / 2)
    said["step"] = _step(work, deployment.speed)
    return said


def _kept(forecast: Forecast) -> str:
    decoder, cards = forecast.deployment.decoder, forecast.deployment.cards
    if decoder.latent:
        return f"({decoder.latent - decoder.rotated} + {decoder.rotated}) of the latent, on every card"
    return f"2 x {-(-decoder.kv_heads // cards)} heads x {decoder.head_dim}"


def _step(work: Work, speed: Speed) -> str:
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
    return text
