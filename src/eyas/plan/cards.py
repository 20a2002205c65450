"""Memory, bandwidth and arithmetic of cards.

Memory is what the driver reports as total, in MiB. Bandwidth and arithmetic are the makers' figures, without sparsity
and, where a card has two, with sums kept in 32 bits. docs/plan.md names the sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eyas.errors import UserError

MIB, GB, TERA = 2**20, 1e9, 1e12


@dataclass(frozen=True, kw_only=True)
class Card:
    """A device that runs models."""

    name: str
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second between memory and arithmetic units."""
    flops: Mapping[str, float]
    """Operations per second by kind of arithmetic."""
    device: str = "cuda"
    link: float = 0.0
    """Bytes per second from this card to others of its machine, in one direction; 0: unknown."""

    def speed_of(self, arithmetic: str) -> float:
        """Operations per second; a kind that the card lacks is computed in 16 bits, or in the first kind it has."""
        return self.flops.get(arithmetic) or self.flops.get("bf16") or next(iter(self.flops.values()))


def _card(
    name: str, mib: int, gb_per_second: float, link: float, fp32: float, bf16: float, fp8: float | None = None
) -> Card:
    teraflops = {"fp32": fp32, "bf16": bf16} | ({} if fp8 is None else {"fp8": fp8})
    flops = {kind: value * TERA for kind, value in teraflops.items()}
    return Card(name=name, memory=mib * MIB, bandwidth=gb_per_second * GB, flops=flops, link=link * GB)


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        _card("rtx3090", 24576, 936, 32, 35.6, 71),
        _card("rtx4090", 24564, 1008, 32, 82.6, 165, 330),
        _card("rtx5090", 32607, 1792, 64, 104.8, 210, 419),
        _card("rtx6000ada", 49140, 960, 32, 91.1, 364, 728),
        _card("a10", 23028, 600, 32, 31.2, 125),
        _card("l4", 23034, 300, 32, 30.3, 121, 242),
        _card("l40s", 46068, 864, 32, 91.6, 362, 733),
        _card("a100-40", 40960, 1555, 300, 19.5, 312),
        _card("a100-80", 81920, 2039, 300, 19.5, 312),
        _card("h100", 81559, 3350, 450, 67, 989, 1979),
        _card("h200", 143771, 4800, 450, 67, 989, 1979),
        _card("b200", 183359, 8000, 900, 80, 2250, 4500),
        _card("mi300x", 196592, 5300, 448, 163, 1307, 2615),
    )
}
"""Name, MiB, GB/s of memory and to other cards (NVLink, Infinity Fabric or PCIe), TFLOPS in 32, 16 and 8 bits."""


def find_card(
    name: str | None,
    *,
    memory: float | None = None,
    bandwidth: float | None = None,
    tflops: float | None = None,
    link: float | None = None,
) -> Card:
    """Look up a card, or describe one or a processor (`cpu`); given GiB, GB/s and TFLOPS override the table's."""
    needed = {"--memory": memory, "--bandwidth": bandwidth, "--tflops": tflops}
    for word, value in (needed | {"--link": link}).items():
        if value is not None and not 0 < value < 1e9:
            raise UserError(f"{word} is {value:g}; it must be above 0")
    card = CARDS.get((name or "").lower())
    if card is None:
        missing = [word for word, value in needed.items() if value is None]
        if missing:
            who = "no --gpu is named" if name is None else f"--gpu {name} is not in the table"
            raise UserError(
                f"{who}; choose one of {', '.join(CARDS)}, or describe the device with {', '.join(missing)} as well "
                "(GiB, GB/s, TFLOPS)"
            )
        device = "cpu" if name == "cpu" else "cuda"
        card = Card(name=name or "described", memory=0, bandwidth=0.0, flops={}, device=device)
    return replace(
        card,
        memory=card.memory if memory is None else int(memory * 2**30),
        bandwidth=card.bandwidth if bandwidth is None else bandwidth * GB,
        flops=card.flops if tflops is None else {"bf16": tflops * TERA},
        link=card.link if link is None else link * GB,
    )
