"""Forecast of a deployment: memory, users that fit, speed, and the best draft depth."""

from dataclasses import dataclass

from eyas.errors import UserError
from eyas.plan.acceptance import DEEPEST, AcceptanceProfile
from eyas.plan.cards import Card
from eyas.plan.decoder import Decoder
from eyas.plan.expect import Expected, auto_speedup, best_depth, expect
from eyas.plan.footprint import DrafterShape, Room, default_batched_tokens, footprint
from eyas.plan.kv_cache_dtype import KVCacheKind
from eyas.plan.memory import BlockBudget, Footprint, blocks_of, longest, plan_blocks, size
from eyas.plan.quantisation import Quantisation
from eyas.plan.roofline import Pair, Speed
from eyas.plan.shapes import OFFERED

SPARE = 0.02
"""Share of a card's memory that stays free, for fragmentation, a screen and the like."""
USERS = (1, 4, 16, 64, 256)
"""Numbers of users in the table, as far as they fit, besides the asked one."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Models, card and load of a server."""

    decoder: Decoder
    drafter: DrafterShape | None
    quantisation: Quantisation
    card: Card
    speed: Speed
    profile: AcceptanceProfile
    users: int
    context: int
    """Tokens of prompt and answer together; steps are timed at half of it."""
    deepest: int = 7
    kv_cache_dtype: KVCacheKind = "auto"
    cards: int = 1
    """Tensor-parallel size; all bytes are of one card."""

    def __post_init__(self) -> None:
        most = self.decoder.context
        if self.cards < 1 or self.decoder.heads % self.cards:
            raise UserError(
                f"--tensor-parallel-size {self.cards} does not divide the {self.decoder.heads} heads of "
                f"{self.decoder.source}; choose a number that does"
            )
        if self.users < 1 or self.context < 2:
            raise UserError(f"{self.users} users and a context of {self.context} were asked for; give 1 and 2 or more")
        if most is not None and self.context > most:
            raise UserError(
                f"--context {self.context:,} is above the {most:,} tokens that {self.decoder.source} was made for; "
                "lower it"
            )
        if not 1 <= self.deepest <= DEEPEST:
            raise UserError(f"--depth {self.deepest} is not from 1 to {DEEPEST}; drafts that deep are not planned for")

    @property
    def room(self) -> Room:
        on_gpu = self.card.device == "cuda"
        return Room(
            max_num_seqs=self.users,
            max_model_len=self.context,
            max_depth=self.deepest,
            max_offers=OFFERED if on_gpu else 0,  # `eyas serve` makes suffix drafts
            max_num_batched_tokens=default_batched_tokens(on_gpu=on_gpu, max_num_seqs=self.users),
        )

    @property
    def pair(self) -> Pair:
        return Pair(
            decoder=self.decoder,
            drafter=self.drafter,
            quantisation=self.quantisation,
            kv_cache_dtype=self.kv_cache_dtype,
            cards=self.cards,
        )

    @property
    def usable(self) -> int:
        """Bytes of the card that are used."""
        return int(self.card.memory * (1 - SPARE))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Memory and speed of a deployment."""

    deployment: Deployment
    footprint: Footprint
    for_blocks: int
    """Bytes that are left for blocks; negative where the rest does not fit."""
    budget: BlockBudget | None
    """Blocks for the asked users, as many as fit; None where not even one request does."""
    users_fit: int
    """Users that fit at the same time, at the asked context."""
    longest_context: int
    """For the asked number of users."""
    table: tuple[Expected, ...]
    """By number of users, then by depth."""
    best: Expected
    """The best depth for the asked number of users."""
    auto_speedup: float
    prompt_seconds: float
    """Seconds to read a prompt of half the context."""

    @property
    def fits(self) -> bool:
        """Whether all users can hold the whole context at the same time."""
        return self.users_fit >= self.deployment.users

    @property
    def needed(self) -> int:
        """Bytes for all users with the whole context."""
        deployment = self.deployment
        blocks = deployment.users * blocks_of(deployment.context, deployment.room.block_size) + 1
        return self.footprint.beside_blocks + blocks * deployment.room.block_size * self.footprint.per_token

    def verdict(self) -> str:
        deployment = self.deployment
        whole = f"{size(self.needed)} of {size(deployment.usable)}" + (" a card" if deployment.cards > 1 else "")
        if self.fits:
            return f"fits: {deployment.users} users of {deployment.context:,} tokens take {whole}"
        who = f"{deployment.users} users of {deployment.context:,} tokens would take {whole}"
        if self.users_fit:
            return f"does not fit: {who}; {self.users_fit} users fit, or {deployment.users} of {self.longest_context:,}"
        if self.for_blocks > 0 and self.longest_context:
            return f"does not fit: {who}; lower the context to {self.longest_context:,}"
        return f"does not fit: {who}; choose a smaller target, a coarser quantisation, a larger card or more of them"


def forecast_of(deployment: Deployment) -> Forecast:
    """Forecast a deployment."""
    room = deployment.room
    taken = footprint(
        deployment.decoder,
        deployment.drafter,
        deployment.quantisation,
        room=room,
        device=deployment.card.device,
        kv_cache_dtype=deployment.kv_cache_dtype,
        cards=deployment.cards,
    )
    loaded = taken.runtime + taken.weights + taken.drafter
    # One more block takes the writes of padding.
    for_blocks = deployment.usable - loaded - taken.beside_weights - room.block_size * taken.per_token
    per_user = blocks_of(deployment.context, room.block_size) * room.block_size * taken.per_token
    users_fit = max(0, for_blocks // per_user)
    budget = None
    if users_fit:
        budget = plan_blocks(
            footprint=taken,
            block_size=room.block_size,
            max_num_seqs=room.max_num_seqs,
            max_model_len=room.max_model_len,
            free_bytes=deployment.usable - loaded,
            memory=for_blocks,
        )
    most = deployment.decoder.context
    length = longest(max(0, for_blocks) // deployment.users, taken.per_token, room.block_size)
    asked = sorted({deployment.users, *(count for count in USERS if count <= users_fit)})
    depths = range(deployment.deepest + 1) if deployment.drafter is not None else range(1)
    pair, speed, profile, half = deployment.pair, deployment.speed, deployment.profile, deployment.context / 2
    table = [
        expect(pair, speed, profile, users=count, depth=depth, context=half) for count in asked for depth in depths
    ]
    best = best_depth([one for one in table if one.users == deployment.users])
    auto = 1.0
    if deployment.drafter is not None:
        like = best.depth or 1
        auto = auto_speedup(
            pair, speed, profile, users=deployment.users, deepest=deployment.deepest, like=like, context=half
        )
    return Forecast(
        deployment=deployment,
        footprint=taken,
        for_blocks=for_blocks,
        budget=budget,
        users_fit=users_fit,
        longest_context=length if most is None else min(length, most),
        table=tuple(table),
        best=best,
        auto_speedup=auto,
        prompt_seconds=speed.seconds(*pair.prefill(deployment.context // 2, room.max_num_batched_tokens)),
    )
