"""Batched speed benchmark: every token is counted once."""

from batched_speed import _run

from each import each
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.target.model import Target


@each("users", [1, 3])
def test_prefill_and_decoding_steps_are_counted_apart(tiny_target: Target, users: int) -> None:
    engine = Engine(tiny_target, config=EngineConfig(max_num_seqs=users, max_model_len=64, memory=2**22))
    for first in range(users):
        prompt = tuple(range(first, first + 9))
        engine.submit(
            Request(prompt=prompt, sampling=Sampling(), max_new_tokens=8, speculation=Speculation(mode="off"))
        )
    reading, decoding, tokens = _run(engine)
    assert reading > 0
    assert decoding > 0
    assert tokens == users * 7, "the first token of an answer comes of reading its prompt"
