"""On a GPU an evaluation counts the reference decoder's rounds, and answers come with the target's own states."""

import copy
from dataclasses import replace

import pytest
import torch

import tiny
from engine.common import OFF, at_depth, options, request, run
from engine.round_engines import graphs_of
from eyas.data.conversations import Conversation
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.evaluate.decoders import EngineDecoders
from eyas.evaluate.prompts import Prompt
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.reference import Chain, decode_speculatively
from oracle.rejection import SeededDraws

pytestmark = pytest.mark.gpu
LAYERS = (0, 2, tiny.LAYERS)
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    return replace(tiny_target, model=copy.deepcopy(tiny_target.model).cuda())


@pytest.mark.parametrize("depth", [1, 4])
def test_rounds_are_the_reference_decoders(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]], depth: int
) -> None:
    asked = [
        Prompt(key=key, ids=ids, category="qa", turn=0, conversation=Conversation(messages=(), where=f"file:{key}"))
        for key, ids in enumerate(prompts)
    ]
    decoders = EngineDecoders(
        target,
        {"d": drafter},
        max_new_tokens=NEW_TOKENS,
        max_depth=depth,
        max_num_seqs=5,
        stop_ids=frozenset({7}),
    )
    plain = {answer.key: answer.tokens for answer in decoders.plainly(asked)}
    answers = {answer.key: answer for answer in decoders.speculatively("d", depth, asked)}
    dense, draft = DenseTarget(target, drafter.config), EagleDraft(drafter)
    for prompt in asked:
        theirs = decode_speculatively(
            dense,
            draft,
            prompt.ids,
            shape=Chain(depth=depth),
            draws=SeededDraws(0),
            max_new_tokens=NEW_TOKENS,
            stop_ids={7},
        )
        assert answers[prompt.key].tokens == theirs.tokens == plain[prompt.key]
        assert answers[prompt.key].accepted == tuple(r.accepted for r in theirs.rounds)


@pytest.mark.parametrize("half", [True, False], ids=["bfloat16", "float32"])
def test_states_are_the_targets_own(
    target: Target, drafter: Drafter, prompts: list[tuple[int, ...]], half: bool
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    chosen = replace(target, model=copy.deepcopy(target.model).to(dtype))
    engine = Engine(chosen, copy.deepcopy(drafter).to(dtype), config=options(hidden_state_layers=LAYERS))
    asked = [request(prompt, speculation=at_depth(3) if i % 3 else OFF) for i, prompt in enumerate(prompts)]
    for one, answer in zip(asked, run(engine, asked), strict=True):
        ids = torch.tensor([[*one.prompt, *answer.tokens]])
        theirs = chosen.forward(ids, LAYERS).aux_hidden_BTX[0, :-1].float()
        assert answer.hidden_states is not None
        error_T = (answer.hidden_states.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert float(error_T.median()) < (0.03 if half else 1e-4)
    assert len(graphs_of(engine)) > 0, "captured passes keep them"
