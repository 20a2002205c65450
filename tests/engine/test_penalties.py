"""Penalties count every token once, whether it was drafted or not: answers are the same with and without drafts."""

from each import each
from engine.round_engines import round_engine
from engine.test_engine import OFF, at_depth, options, request, run
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.sampling import Sampling
from eyas.target.model import Target

STRONG = [
    Sampling(frequency_penalty=1.0),
    Sampling(temperature=0.8, frequency_penalty=-1.5),
]


@each("sampling", STRONG)
def test_strong_penalties_give_the_same_answers_with_drafts(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], sampling: Sampling
) -> None:
    asked = [{"prompt": prompt, "sampling": sampling, "max_new_tokens": 24} for prompt in prompts]
    plain = run(Engine(target, config=options()), [request(**one, speculation=OFF) for one in asked])
    for engine in (Engine(target, tiny_drafter, config=options()), round_engine(target, tiny_drafter, options())):
        drafted = run(engine, [request(**one, speculation=at_depth(4)) for one in asked])
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
        assert sum(answer.stats.accepted for answer in drafted) > 0
