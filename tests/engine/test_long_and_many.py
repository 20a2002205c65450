"""A request of 8k tokens and 63 others of mixed lengths share a block budget that was stated before the start.

make lossless PROMPTS=FILE
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.model import Target

pytestmark = pytest.mark.lossless
LONGEST, USERS, NEW_TOKENS = 8192, 64, 16


def test_a_long_request_among_many_short_ones(
    real_prompts: Callable[[int, int], list[list[int]]], real_drafter: Drafter, default_target: Target
) -> None:
    options = EngineConfig(max_num_seqs=USERS, max_model_len=LONGEST, memory=2**30)
    with pytest.raises(UserError, match=r"needs 372\.7 MiB of blocks, above the 64\.0 MiB granted"):
        Engine(default_target, real_drafter, config=replace(options, memory=2**26))
    engine = Engine(default_target, real_drafter, config=options)
    prompts = real_prompts(USERS - 1, 400)
    everything = [token for prompt in prompts * 4 for token in prompt]
    lengths = random.Random(0)
    asked = [everything[: LONGEST - NEW_TOKENS], *(prompt[: lengths.choice([20, 60, 150, 400])] for prompt in prompts)]
    assert len(asked[0]) == LONGEST - NEW_TOKENS
    answers = {
        engine.submit(Request(prompt=tuple(prompt), sampling=Sampling(), max_new_tokens=NEW_TOKENS)): 0
        for prompt in asked
    }
    most = 0
    while engine.busy:
        for piece in engine.step():
            answers[piece.key] += len(piece.tokens)
        engine.scheduler.check()
        most = max(most, engine.block_manager.used)
    print(f"\n{engine.budget}; {most} blocks were used at most")
    assert set(answers.values()) == {NEW_TOKENS}
    assert engine.block_manager.used == 0
