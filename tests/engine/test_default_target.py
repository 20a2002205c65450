"""Speculation on the default target. Its drafter is random here: nothing but the rule keeps the output right."""

import random

import pytest

from default_drafter import default_drafter_config
from each import each
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.plain import generate_plainly
from oracle.reference import Chain, Tree, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws
from tiny import random_drafter

pytestmark = pytest.mark.default
NEW_TOKENS = 5
QUESTIONS = ["What is the capital of France?", "Count from 1 to 5."]


def encode(target: Target, question: str) -> list[int]:
    return target.encode_chat([{"role": "user", "content": question}])


@each("shape", [Chain(depth=3), Tree(depth=2, width=2, budget=3)])
def test_greedy_speculation_equals_plain_decoding_and_transformers(default_target: Target, shape: Chain | Tree) -> None:
    config = default_drafter_config(fc_norm=True, norm_output=True)
    drafter = random_drafter(config, own_embedding=False).share_target(
        default_target.embedding(), default_target.head()
    )
    target, stop_ids = DenseTarget(default_target, config), default_target.stop_ids()
    ids = encode(default_target, QUESTIONS[isinstance(shape, Tree)])
    theirs = generate_plainly(default_target, ids, sampling=Sampling(), max_new_tokens=NEW_TOKENS)
    plain = decode_plainly(target, ids, draws=SeededDraws(0), max_new_tokens=NEW_TOKENS, stop_ids=stop_ids)
    ours = decode_speculatively(
        target,
        EagleDraft(drafter),
        ids,
        shape=shape,
        draws=SeededDraws(0),
        max_new_tokens=NEW_TOKENS,
        stop_ids=stop_ids,
    )
    assert ours.tokens == plain == theirs
    assert ours.rounds


def test_the_streamed_text_is_the_text_of_the_returned_tokens(default_target: Target) -> None:
    ids = encode(default_target, QUESTIONS[0])
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=20, top_p=0.9)):
        pieces: list[str] = []
        tokens = generate_plainly(default_target, ids, sampling=sampling, max_new_tokens=12, on_text=pieces.append)
        assert len(pieces) > 1, "it comes in pieces"
        assert "".join(pieces) == default_target.decode(tokens)


def test_plain_sampling_repeats_by_seed(default_target: Target) -> None:
    ids = encode(default_target, "Tell me a story.")
    hot = Sampling(temperature=1.5)
    first, again, other = (
        generate_plainly(default_target, ids, sampling=hot, max_new_tokens=5, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.default
def test_short_calls_are_decoded_as_all_others(default_target: Target) -> None:
    decode, chance = default_target.decoder(), random.Random(2)
    assert decode is not default_target.decode, "the lean way"
    for _ in range(2000):
        ids = tuple(chance.randrange(default_target.facts.vocab_size) for _ in range(chance.choice([1, 2, 5])))
        for skip in (True, False):
            assert decode(ids, skip) == default_target.decode(ids, skip)
