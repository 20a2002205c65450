"""Real prompts through the default target on a GPU: the engine's greedy answers are transformers' own.

    make gpu PROMPTS=FILE

In float32 answers may differ only where the two best tokens lie within 1e-4. In bfloat16 a logit is precise to a few
hundredths at best, and transformers' own answers change with the shape of a pass. So ties are judged by the error of
transformers' logits at that place against float32: two tokens may change places if float32 separates them by less than
twice that error. All margins are printed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pytest
from torch import Tensor

from engine.round_engines import graphs_of
from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.model import Drafter
from eyas.drafter.shipped import DEFAULT_DRAFTER
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.sampling import Sampling
from eyas.target.locate import DEFAULT_TARGET
from eyas.target.model import Target
from oracle.dense import DenseTarget
from oracle.plain import generate_plainly
from real_prompts import parting, read_prompts, spread

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("falls_back_to_nothing")]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, DEPTH = 50, 400, 32, 4
NEAR_TIE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Manner:
    """One way to run the engine."""

    users: int
    depth: int = DEPTH
    options: dict[str, Any] = field(default_factory=dict)


MANNERS = {
    "plain, 16 users": Manner(users=16, depth=0),
    "chain, 1 user": Manner(users=1),
    "chain, 16 users": Manner(users=16),
    "chain, 16 users, eager": Manner(users=16, options={"graphs": False}),
    "tree, 7 users": Manner(users=7, options={"tree": Tree(depth=4, width=3, budget=12)}),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """The default target and its drafter in one precision, with the answers of transformers."""

    target: Target
    drafter: Drafter
    prompts: list[list[int]]

    @cached_property
    def theirs(self) -> list[tuple[int, ...]]:
        """Answers by transformers."""
        plainly = partial(generate_plainly, self.target, sampling=Sampling(), max_new_tokens=NEW_TOKENS)
        return [plainly(ids) for ids in self.prompts]

    def logits_behind(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] of the token after these ids."""
        return DenseTarget(self.target, self.drafter.config)([ids])[0][0][-1].float()


@pytest.fixture(scope="module")
def pair_in(pytestconfig: pytest.Config) -> Callable[[str], Pair]:
    path = pytestconfig.getoption("--prompts")
    if not path:
        pytest.skip("no --prompts FILE: run `make gpu PROMPTS=FILE`")
    made: dict[str, Pair] = {}

    def load(dtype: str) -> Pair:
        if dtype not in made:
            target = Target.load(DEFAULT_TARGET, dtype=dtype, device="cuda")
            drafter = load_drafter(pytestconfig.getoption("--drafter") or DEFAULT_DRAFTER[DEFAULT_TARGET])
            drafter = drafter.to(device=target.device, dtype=target.dtype)
            drafter.share_target(target.embedding(), target.head())
            prompts = spread(read_prompts(path, target), PROMPTS, PROMPT_TOKENS)
            made[dtype] = Pair(target=target, drafter=drafter, prompts=prompts)
        return made[dtype]

    return load


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MANNERS)
def test_greedy_answers_part_from_transformers_at_ties_alone(
    name: str, dtype: str, pair_in: Callable[[str], Pair]
) -> None:
    manner, pair, exact = MANNERS[name], pair_in(dtype), pair_in("float32")
    engine = Engine(
        pair.target,
        pair.drafter if manner.depth else None,
        config=EngineConfig(max_num_seqs=manner.users, max_model_len=512, **manner.options),
    )
    speculation = Speculation(mode="fixed", depth=manner.depth) if manner.depth else Speculation(mode="off")
    answers = engine.generate(
        Request(
            prompt=tuple(ids),
            sampling=Sampling(),
            max_new_tokens=NEW_TOKENS,
            stop_ids=pair.target.stop_ids(),
            speculation=speculation,
        )
        for ids in pair.prompts
    )
    near_ties, wrong = list[str](), list[str]()
    for number, (ids, answer, mine) in enumerate(zip(pair.prompts, pair.theirs, answers, strict=True)):
        at = parting(mine.tokens, answer)
        if at is None:
            continue
        before = [*ids, *answer[:at]]
        rounded_V, exact_V = pair.logits_behind(before), exact.logits_behind(before)
        margin, in_own = (abs(float(x_V[mine.tokens[at]] - x_V[answer[at]])) for x_V in (exact_V, rounded_V))
        allowed = NEAR_TIE if dtype == "float32" else 2 * float((rounded_V - exact_V).abs().max())
        (near_ties if margin < allowed else wrong).append(
            f"prompt {number}, token {at}: margin {margin:.2e} in float32, {in_own:.2e} in {dtype}; tie {allowed:.2e}"
        )
    print(
        f"\n{dtype}, {name}, {len(graphs_of(engine))} graphs: {PROMPTS - len(near_ties) - len(wrong)} of {PROMPTS} "
        "identical, "
        f"{len(near_ties)} differ at a near-tie, {len(wrong)} are wrong; "
        f"acceptance length {engine.stats.acceptance_length:.2f}"
    )
    print("\n".join([*near_ties, *wrong]))
    assert not wrong
    if manner.depth:
        assert engine.stats.accepted > 0, "a drafter of which nothing is accepted proves nothing"
