"""Weights of a drafter of the same shape are copied into place: no request starts again, nothing is captured again, no
token changes, and from then on drafts are the new drafter's."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from each import each
from engine.common import AUTO, OFF, Prompts, at_depth, options, request, run
from engine.noted_drafts import note_drafts
from engine.round_engines import Uncaptured, round_engine
from engine.test_quantised_target import quantised
from eyas.drafter.recorded_acceptance import RecordedAcceptance
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.runner import drafter as drafter_runner
from eyas.engine.runner import fused_drafter as fused
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.speculation.draft import Tree
from eyas.engine.suffix.config import SuffixConfig
from eyas.errors import UserError
from eyas.kernels.linear.embedding_table import QuantisedEmbedding
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.kernels.linear.quantised_linear import load_quantised, quantise, replace_by_blocks
from eyas.sampling import Sampling
from eyas.train.init import set_vocabulary
from tiny import VOCAB, drafter_config, eagle1_config, language, random_drafter

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

KINDS = ("module", "torch", "packed", "halved", "int8")
"""How a drafter is computed: by its module, in joined products by torch, in C with float32 and with bfloat16 panels, in
C with 8-bit weights beside a quantised target."""
TREE = Tree(depth=3, width=2, budget=6)


class Way:
    """A target and drafters of one shape, computed one way. Every drafter has tensors of its own."""

    def __init__(self, kind: str, target: Target, trained: Drafter) -> None:
        self.kind, self.trained, self.kernel = kind, trained, None
        if kind == "int8":
            self.kernel, words = load_quantised()
            if self.kernel is None:
                pytest.skip(f"no integer products here: {words}")
            target = replace(quantised(target, self.kernel, lambda x: quantise(x, 8)), quantization="int8")
        self.target = target

    def drafter(self, noise: float = 0.0) -> Drafter:
        """The trained drafter, or with noise one that drafts less well."""
        made, generator = deepcopy(self.trained).to(self.target.device), torch.Generator().manual_seed(9)
        made.embed_tokens = None
        for weight in made.parameters():
            weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.device)
            if self.kind == "halved":
                weight.data = weight.data.bfloat16().float()
        made.share_target(*self.target.tables())
        if self.kernel is not None:
            replace_by_blocks(made, self.kernel, lambda linear: quantise(linear.weight, 8))
            made.quantization = "int8"
        if self.kind in ("packed", "halved"):
            assert pack_linears(made, halve=self.kind == "halved").linears
        return made


@pytest.fixture(params=KINDS)
def way(request: pytest.FixtureRequest, target: Target, tiny_drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> Way:
    if request.param == "module":
        monkeypatch.setattr(fused, "elementwise_for", lambda _: None)
    return Way(request.param, target, tiny_drafter)


@pytest.fixture
def packed(target: Target, tiny_drafter: Drafter) -> Way:
    return Way("packed", target, tiny_drafter)


def asked(count: int = 8, *, speculation: Speculation | None = None) -> list[Request]:
    """Greedy and sampled requests, some of them drafted for."""
    rows = language(count, 40, torch.Generator().manual_seed(3)).tolist()
    ways = [at_depth(3), AUTO, OFF, at_depth(2)] if speculation is None else [speculation]
    chance = Sampling(temperature=0.9, top_p=0.9)
    return [
        request(
            tuple(row[: 5 + 3 * i]),
            speculation=ways[i % len(ways)],
            max_new_tokens=24,
            sampling=chance if i % 3 == 2 else Sampling(),
            seed=i,
        )
        for i, row in enumerate(rows)
    ]


def answers(engine: Engine, requests: list[Request], swaps: dict[int, Drafter] | None = None) -> Prompts:
    """Answers, while weights change before steps of these numbers."""
    keys, swaps = [engine.submit(one) for one in requests], dict(swaps or {})
    tokens: dict[int, list[int]] = {key: [] for key in keys}
    step = 0
    while engine.busy:
        if step in swaps:
            running = [(seq.key, seq.stay, seq.slot, tuple(seq.blocks)) for seq in engine.scheduler.running]
            assert running, "there is work"
            landing = engine.core.busy
            assert engine.swap_drafter(swaps.pop(step), in_place=True)
            engine.scheduler.check()
            left = [(seq.key, seq.stay, seq.slot, tuple(seq.blocks)) for seq in engine.scheduler.running]
            if not landing:
                assert left == running, "no request loses its place"
            assert [one[:3] for one in left] == [one[:3] for one in running if one[0] in [key for key, *_ in left]]
        for seq in engine.scheduler.requests:
            assert seq.preemptions == 0, "no request starts again"
        for delta in engine.step():
            tokens[delta.key] += delta.tokens
        engine.scheduler.check()
        step += 1
    assert not swaps, "all swaps came while there was work"
    assert engine.block_manager.used == 0
    return [tuple(tokens[key]) for key in keys]


def known_to_target(engine: Engine, requests: list[Request]) -> Engine:
    """An engine whose target has read these requests and whose drafter has not, as after a change of weights."""
    answers(engine, [replace(one, speculation=OFF) for one in requests])
    return engine


def plainly(target: Target, requests: list[Request]) -> Prompts:
    return answers(Engine(target, config=options()), [replace(one, speculation=OFF) for one in requests])


def drafts_of(engine: Engine, requests: list[Request]) -> Prompts:
    """All drafts for requests, in order."""
    made: list[tuple[int, ...]] = []
    end = note_drafts(engine, lambda drafted: made.append(drafted.drafts))
    run(engine, requests)
    end()
    assert any(made)
    return made


def accepted(engine: Engine, requests: list[Request]) -> Prompts:
    return [output.accepted for output in run(engine, requests)]


# --- answers -----------------------------------------------------------------------------------------------------


@each("tree", [None, TREE])
def test_answers_under_way_are_the_same_whatever_weights_come_and_go(way: Way, tree: Tree | None) -> None:
    engine = Engine(way.target, way.drafter(), config=options(tree=tree))
    requests = asked()
    swaps = {2: way.drafter(0.3), 4: way.drafter(3.0), 5: way.drafter(), 8: way.drafter(0.3)}
    assert answers(engine, requests, swaps) == plainly(way.target, requests)
    assert engine.stats.accepted > 0


@each("tree", [None, TREE])
@each("synchronous", [False, True])
def test_rounds_on_a_device_continue_and_nothing_is_captured_again(
    target: Target, tiny_drafter: Drafter, tree: Tree | None, synchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, requests, captured = Way("torch", target, tiny_drafter), asked(speculation=at_depth(3)), list[object]()
    capture = Uncaptured._capture

    def counted(self: Any, *given: Any) -> Any:
        captured.append(given)
        return capture(self, *given)

    monkeypatch.setattr(Uncaptured, "_capture", counted)
    expected = plainly(target, requests)
    engine = round_engine(target, way.drafter(), options(tree=tree), synchronous=synchronous)
    graphs, state = engine.core.runner.capture, engine.core.runner.state
    assert answers(engine, requests, {3: way.drafter(0.3), 6: way.drafter(3.0), 8: way.drafter()}) == expected
    before = len(captured)
    assert engine.swap_drafter(way.drafter(0.3), in_place=True)
    assert len(captured) == before
    assert answers(engine, requests, {5: way.drafter()}) == expected
    assert engine.core.runner.capture is graphs
    assert engine.core.runner.state is state
    assert len(captured) == len(graphs), "none was captured twice"
    assert engine.stats.accepted > 0


def test_graphs_captured_ahead_stay_and_are_planned_with(target: Target, tiny_drafter: Drafter) -> None:
    way, requests = Way("torch", target, tiny_drafter), asked(4, speculation=AUTO)
    engine = round_engine(target, way.drafter(), options(max_num_seqs=4))
    ahead, costs = engine.capture_graphs(), engine.controller.costs
    shapes = engine.controller.shapes
    assert engine.swap_drafter(way.drafter(0.3), in_place=True)
    assert len(engine.core.runner.capture) == ahead
    assert engine.controller.costs is costs, "times of passes are still known"
    assert engine.controller.shapes is shapes
    assert answers(engine, requests, {2: way.drafter()}) == plainly(target, requests)


# --- drafts ------------------------------------------------------------------------------------------------------


@each("tree", [None, TREE])
def test_new_requests_are_drafted_for_as_if_the_new_drafter_had_always_been_there(way: Way, tree: Tree | None) -> None:
    requests = asked(speculation=at_depth(3))
    old, new = (
        drafts_of(known_to_target(Engine(way.target, way.drafter(x), config=options(tree=tree)), requests), requests)
        for x in (0.3, 0.0)
    )
    assert old != new
    engine = Engine(way.target, way.drafter(0.3), config=options(tree=tree))
    answers(engine, requests)  # their prefixes, read with the old weights, must not be found
    answers(engine, requests, {3: way.drafter()})  # nor what was read of these
    assert drafts_of(engine, requests) == new
    assert engine.swap_drafter(way.drafter(0.3), in_place=True)
    assert drafts_of(engine, requests) == old, "going back gives the old drafts"


def test_new_requests_on_a_device_are_too(target: Target, tiny_drafter: Drafter) -> None:
    way, requests = Way("torch", target, tiny_drafter), asked(speculation=at_depth(3))
    old, new = (
        accepted(known_to_target(round_engine(target, way.drafter(x), options()), requests), requests)
        for x in (0.3, 0.0)
    )
    assert old != new
    engine = round_engine(target, way.drafter(0.3), options())
    answers(engine, requests, {3: way.drafter(), 5: way.drafter(0.3), 7: way.drafter()})
    assert accepted(engine, requests) == new


MORE_SHAPES: dict[str, Any] = {
    "two layers": drafter_config(num_hidden_layers=2),
    "norms of heads": drafter_config(qk_norm=True, fc_norm=True, norm_output=True),
    "biases": drafter_config(attention_bias=True, mlp_bias=True),
    "norm before fc": drafter_config(norm_before_fc=True, norm_before_residual=True),
    "pruned": drafter_config(draft_vocab_size=48),
    "EAGLE-1": eagle1_config(fc_bias=True),
}


@pytest.mark.slow
@each("packs", [False, True])
@each("config", MORE_SHAPES.values())
def test_every_weight_of_every_shape_is_the_new_one(target: Target, config: Any, packs: bool) -> None:
    def made(seed: int) -> Drafter:
        drafter = random_drafter(config, seed=seed)
        for weight in drafter.parameters():
            weight.data += 0.05 * torch.randn(weight.shape)
        drafter.share_target(*target.tables(), target.last_norm())
        if packs:
            pack_linears(drafter, halve=True)
        return drafter

    engine, fresh = Engine(target, made(1), config=options()), Engine(target, made(2), config=options())
    run(engine, asked(2, speculation=at_depth(3)))
    assert engine.swap_drafter(made(2), in_place=True)
    ours, theirs = runner_of(engine), runner_of(fresh)
    assert torch.equal(ours.token_W, theirs.token_W)
    assert drafts_of(engine, asked(4, speculation=at_depth(5))) == drafts_of(fresh, asked(4, speculation=at_depth(5)))
    for mine, other in zip(computed(ours, config), computed(theirs, config), strict=True):
        assert torch.equal(mine, other)


def runner_of(engine: Engine) -> DrafterRunner:
    assert engine._drafting is not None
    return engine._drafting


@torch.inference_mode()
def computed(runner: DrafterRunner, config: Any) -> list[Tensor]:
    """Some of its results."""
    aux_NX = torch.randn(
        5, config.num_aux_hidden_states * config.target_hidden_size, generator=torch.Generator().manual_seed(1)
    )
    hidden_ND = runner.run.fuse(aux_NX)
    kept = [hidden_ND, runner.run.logits(hidden_ND)]
    if runner.remembers:
        kept += runner.run.remember(hidden_ND, torch.arange(5), torch.arange(5))
    return kept


def test_the_targets_own_tables_are_never_written(way: Way) -> None:
    engine, tables = Engine(way.target, way.drafter(), config=options()), way.target.tables()

    def bits() -> list[Tensor]:
        return [table.clone() if isinstance(table, Tensor) else table.weight.clone() for table in tables]

    before, copied = bits(), deepcopy(way.drafter())
    # A copy has tables of its own, which may hold anything: the target's are used for drafting.
    assert copied.embed_tokens is not None
    if isinstance(copied.embed_tokens, QuantisedEmbedding):
        (table,) = copied.embed_tokens.table.packed()
        table.zero_()
    else:
        copied.embed_tokens.weight.data.fill_(7.0)
    assert engine.swap_drafter(copied, in_place=True)
    assert all(torch.equal(old, new) for old, new in zip(before, bits(), strict=True))
    fresh = Engine(way.target, way.drafter(), config=options())
    requests = asked(3, speculation=at_depth(3))
    assert drafts_of(engine, requests) == drafts_of(fresh, requests)


# --- caches and estimates ----------------------------------------------------------------------------------------


def test_prefixes_of_the_target_are_still_found_and_the_drafters_are_read_again(packed: Way) -> None:
    engine = Engine(packed.target, packed.drafter(0.3), config=options())
    followed = request(tuple(language(1, 40, torch.Generator().manual_seed(4))[0].tolist()), speculation=at_depth(3))
    alone = replace(followed, speculation=OFF)
    run(engine, [followed])
    assert engine.swap_drafter(packed.drafter(), in_place=True)
    cached = [run(engine, [one])[0].num_cached_tokens for one in (alone, followed, followed)]
    assert min(cached) > 30


def test_what_was_read_of_requests_under_way_is_found_for_the_target_only(packed: Way) -> None:
    engine = Engine(packed.target, packed.drafter(0.3), config=options())
    prompt = tuple(language(1, 18, torch.Generator().manual_seed(4))[0].tolist())
    under_way = request(prompt, speculation=at_depth(3), max_new_tokens=40)
    (answer,) = answers(engine, [under_way], {1: packed.drafter()})
    run(engine, [replace(under_way, max_new_tokens=12)])  # lets the first blocks be found again
    asked_again = request((*prompt, *answer), speculation=at_depth(3))
    key = engine.submit(asked_again)
    engine.step()
    (seq,) = engine.scheduler.running
    engine.cancel(key)
    assert seq.num_cached_tokens is not None
    assert seq.num_cached_tokens > len(prompt) + 24


def test_acceptance_starts_from_the_new_record_and_times_are_kept(packed: Way) -> None:
    engine = Engine(packed.target, packed.drafter(), config=options())
    run(engine, asked())
    assert engine.controller.report()["rounds"] > 0
    costs, better = engine.controller.costs, packed.drafter(0.3)
    better.recorded_acceptance = RecordedAcceptance(rounds=100, accepted_at=(90, 45), source="a test")
    assert engine.swap_drafter(better, in_place=True)
    assert engine.controller.report()["rounds"] == 0
    assert engine.controller.costs is costs
    assert engine.controller.acceptance.by_depth[:2] == pytest.approx([0.9, 0.5], abs=0.1)


def test_suffix_drafts_go_on_beside_it(packed: Way) -> None:
    requests = asked(speculation=AUTO)
    expected = plainly(packed.target, requests)
    for build in (lambda *given: Engine(*given[:2], config=given[2]), round_engine):
        engine = build(packed.target, packed.drafter(), options(suffix=SuffixConfig()))
        assert answers(engine, requests, {3: packed.drafter(0.3), 6: packed.drafter()}) == expected


# --- drafters that cannot be copied ------------------------------------------------------------------------------


@each(
    "changes",
    [
        {"fc_norm": False},
        {"aux_layer_ids": (0, 1, 2)},
        {"draft_vocab_size": 48},
        {"intermediate_size": 64},
        {"rms_norm_eps": 1e-6},
        {"logit_scale": 0.5},
        {"num_hidden_layers": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ],
)
def test_a_drafter_of_another_shape_replaces_the_old_one(
    packed: Way, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = drafter_config(**{"fc_norm": True, "norm_output": True, **changes})
    engine, requests = Engine(packed.target, packed.drafter(), config=options()), asked(4)
    old, other = runner_of(engine), random_drafter(config, own_embedding=False)
    other.share_target(*packed.target.tables())
    before = deepcopy(old.model.state_dict())
    with caplog.at_level("INFO"):
        assert not engine.swap_drafter(other, in_place=True)
    assert "not overwritten in place" in caplog.text
    assert runner_of(engine).model is other
    assert all(torch.equal(value, before[name]) for name, value in old.model.state_dict().items())
    assert answers(engine, requests) == plainly(packed.target, requests)


def test_so_does_one_that_is_computed_differently(packed: Way, target: Target, tiny_drafter: Drafter) -> None:
    for kind in ("torch", "halved"):
        other = Way(kind, target, tiny_drafter).drafter()
        assert not Engine(target, packed.drafter(), config=options()).swap_drafter(other, in_place=True)
    assert not Engine(target, packed.drafter(), config=options()).swap_drafter(None, in_place=True)
    assert not Engine(target, config=options()).swap_drafter(packed.drafter(), in_place=True)


def test_with_or_refuse_another_shape_is_refused_and_nothing_changes(packed: Way) -> None:
    """A drafter that was trained on traffic must not make requests start again."""
    other = random_drafter(drafter_config(fc_norm=True, norm_output=False), own_embedding=False)
    other.share_target(*packed.target.tables())
    engine = Engine(packed.target, packed.drafter(), config=options())
    runner = runner_of(engine)
    with pytest.raises(UserError, match="its norm_output is False"):
        engine.swap_drafter(other, in_place=True, or_refuse=True)
    assert runner_of(engine) is runner
    assert engine.swap_drafter(packed.drafter(0.3), in_place=True, or_refuse=True)
    with pytest.raises(UserError, match="there is no drafter"):
        Engine(packed.target, config=options()).swap_drafter(packed.drafter(), in_place=True, or_refuse=True)


def test_without_in_place_the_old_drafter_is_not_overwritten(packed: Way) -> None:
    first, second = packed.drafter(), packed.drafter(0.3)
    engine = Engine(packed.target, first, config=options(prefix_cache=False))
    requests = asked(4, speculation=at_depth(3))
    drafts = drafts_of(engine, requests)
    assert not engine.swap_drafter(second)
    assert drafts_of(engine, requests) != drafts
    assert not engine.swap_drafter(first)
    assert drafts_of(engine, requests) == drafts


def shorten(drafter: Drafter, name: str) -> None:
    parent, _, leaf = name.rpartition(".")
    module = drafter.get_submodule(parent)
    setattr(module, leaf, nn.Parameter(getattr(module, leaf)[:-1].clone(), requires_grad=False))


def with_ids_beyond(drafter: Drafter) -> None:
    assert drafter.d2t is not None
    drafter.d2t.fill_(VOCAB)


@pytest.mark.slow
@each(
    ("spoil", "says"),
    [
        (lambda drafter: shorten(drafter, "fc.weight"), r"fc\.weight is \[63, 192\].*must be \[64, 192\]"),
        (lambda drafter: shorten(drafter, "layers.0.hidden_norm.weight"), r"hidden_norm\.weight is \[63\]"),
        (lambda drafter: shorten(drafter, "norm.weight"), r"norm\.weight is \[63\]"),
        (with_ids_beyond, "d2t maps to target id"),
        (None, "no memory"),
    ],
)
def test_a_copy_that_fails_leaves_the_old_drafter_whole(
    target: Target, spoil: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(seed: int) -> Drafter:
        drafter = random_drafter(drafter_config(draft_vocab_size=48), seed=seed)
        set_vocabulary(drafter, torch.arange(seed, seed + 48))
        return drafter

    for build in (lambda *given: Engine(*given[:2], config=given[2]), round_engine):
        engine, broken = build(target, made(1), options()), made(2)
        kept = engine.proposer, engine.controller, engine.core, runner_of(engine)
        before = deepcopy(kept[-1].model.state_dict())
        with monkeypatch.context() as patched:
            if spoil is None:
                patched.setattr(drafter_runner, "fused_drafter", _without_memory)
            else:
                spoil(broken)
            with pytest.raises((UserError, MemoryError), match=says):
                engine.swap_drafter(broken, in_place=True)
        assert (engine.proposer, engine.controller, engine.core, runner_of(engine)) == kept
        assert all(torch.equal(value, before[name]) for name, value in kept[-1].model.state_dict().items())
        requests = asked(4)
        assert answers(engine, requests) == plainly(target, requests)
        assert engine.swap_drafter(made(2), in_place=True), "another one can come"


def _without_memory(_: Drafter) -> Any:
    raise MemoryError("no memory")
