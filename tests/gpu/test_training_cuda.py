"""Training on a GPU in half precision computes what a plain float32 version on a CPU computes."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import tiny
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.packed import PackedTarget, runs_in_one_pass
from eyas.target.parts import TargetParts
from eyas.train.attention import DenseUnrollAttention, FlashUnrollAttention, UnrollAttention, attention_for
from eyas.train.batch import CorpusPacks, TrainingBatch
from eyas.train.features import ExactDistribution
from eyas.train.init import config_for, init_drafter
from eyas.train.loss import LOSSES, compare, row_loss_of
from eyas.train.recipe import DrafterSettings
from eyas.train.sources.live import LiveSource
from eyas.train.state import TrainState
from eyas.train.unroll import depth_weights, unroll
from train.batches import batch_of, drafter_of
from train.test_loop import corpus_of, train_state_of

pytestmark = pytest.mark.gpu

DOCUMENTS = [300, 17, 200, 183]
DEPTHS = 4
HEADS, KEY_HEADS, SIZE = 9, 3, 64


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference relative to the norm of the reference."""
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    assert ours.shape == theirs.shape
    return float((ours - theirs).norm() / theirs.norm())


def attended(attend: UnrollAttention, batch: TrainingBatch, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of every depth, and gradients of their sum with respect to queries, keys and values."""
    generator = torch.Generator("cuda").manual_seed(0)
    taught, context = len(batch.slots.taught_M), len(batch.slots.context_P)

    def draw(slots: int, heads: int) -> Tensor:
        # Rounded once, so that both precisions get equal numbers.
        return torch.randn(slots, heads, SIZE, device="cuda", generator=generator).bfloat16().to(dtype).requires_grad_()

    inputs = [[draw(taught, heads) for heads in (HEADS, KEY_HEADS, KEY_HEADS)] for _ in range(DEPTHS)]
    read = (draw(context, KEY_HEADS), draw(context, KEY_HEADS))
    pulls = [draw(taught, HEADS).detach() for _ in range(DEPTHS)]
    outputs = [attend.at(depth, None if depth else read)(0, q, k, v) for depth, (q, k, v) in enumerate(inputs)]
    leaves = [*(x for own in inputs for x in own), *read]
    return outputs, list(torch.autograd.grad(outputs, leaves, pulls))


def taught_tokens(*answers: tuple[int, int]) -> list[int]:
    """A mask over all documents with ones from the first to before the second of each pair."""
    return [int(any(first <= token < end for first, end in answers)) for token in range(sum(DOCUMENTS))]


MASKS = {
    "one answer in each document": taught_tokens((150, 300), (305, 317), (318, 517), (650, 700)),
    "answers with turns between, a document that teaches nothing": taught_tokens(
        (20, 60), (200, 202), (210, 290), (330, 400), (402, 500), (699, 700)
    ),
    "a slot in each": taught_tokens((100, 102), (310, 312), (400, 402), (600, 602)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("answers", MASKS)
def test_flash_attention_equals_attention_written_out_in_values_and_gradients(answers: str, compiled: bool) -> None:
    batch = batch_of(DOCUMENTS, mask=MASKS[answers], device="cuda")
    ours = attended(FlashUnrollAttention(batch, compiled=compiled), batch, torch.bfloat16)
    theirs = attended(DenseUnrollAttention(batch), batch, torch.float32)
    for depth in range(DEPTHS):
        assert distance(ours[0][depth], theirs[0][depth]) < 0.01, f"output of depth {depth}"
    names = [f"{name} of depth {depth}" for depth in range(DEPTHS) for name in ("query", "key", "value")]
    names += ["key of the context", "value of the context"]
    for name, flash, dense in zip(names, ours[1], theirs[1], strict=True):
        assert distance(flash, dense) < 0.01, name


def test_the_last_depth_reads_the_first_ones_keys_and_its_own_slot_only() -> None:
    batch = batch_of(DOCUMENTS, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    attend = FlashUnrollAttention(batch)
    slots, keys = batch.slots.taught_M.tolist(), []
    for depth in range(2):
        q, k, v = (
            torch.randn(len(slots), heads, SIZE, device="cuda", generator=generator).bfloat16().requires_grad_()
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        keys.append(k)
        out = attend.at(depth)(0, q, k, v)
    # A slot of the second document, 300 to 316.
    first, own = torch.autograd.grad(out[slots.index(310)].float().sum(), keys)
    seen = [[slots[i] for i in x.abs().sum(dim=(1, 2)).nonzero().flatten().tolist()] for x in (first, own)]
    assert seen == [list(range(300, 311)), [310]]


def random_llama(dtype: torch.dtype) -> Target:
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.05}
    model = LlamaForCausalLM(tiny.target_config(**sizes)).to("cuda", dtype).eval().requires_grad_(False)
    return Target(facts=facts_of(model.config, "random"), model=model, tokenizer=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [False, True])
def test_one_pass_over_all_documents_equals_each_document_alone(compiled: bool) -> None:
    target, batch = random_llama(torch.bfloat16), batch_of(DOCUMENTS, device="cuda")
    assert runs_in_one_pass(target)
    inputs = (batch.ids_T, batch.position_T, batch.starts, batch.longest)
    together = PackedTarget(target, tiny.AUX_IDS, one_pass=True, compiled=compiled)(*inputs)
    alone = PackedTarget(target, tiny.AUX_IDS, one_pass=False)(*inputs)
    for ours, theirs in zip(together, alone, strict=True):
        assert distance(ours, theirs) < 0.02
    # Control: one document of all tokens gives other results.
    whole = batch_of([sum(DOCUMENTS)], device="cuda")
    leaking = PackedTarget(target, tiny.AUX_IDS, one_pass=True)(
        batch.ids_T, batch.position_T, whole.starts, whole.longest
    )
    assert distance(leaking[0], alone[0]) > 0.05


def losses(target: Target, state: TrainState, *, steps: int, compiled: bool) -> list[float]:
    """The loss before each of some steps on the same pack."""
    packs = CorpusPacks(corpus=corpus_of(24), length=512, seed=0, device=target.device, padded=compiled)
    batch = packs.epoch(0)[0].build()
    features = LiveSource(target, tiny.AUX_IDS, compiled=compiled)(batch)
    depths = state.settings.depths
    counts, found = batch.counts(depths), []
    for _ in range(steps):
        state.backward(batch, features, counts)
        mean_S = state.metrics_3S[0].cpu() / torch.tensor(counts)
        found.append(float((mean_S * torch.tensor(depth_weights(depths, state.settings.gamma))).sum()))
        state.optimizer_step(state.gradient_norm().cpu(), 1.0)
    return found


@pytest.mark.parametrize("loss", [*LOSSES, {"cross_entropy": 0.1, "total_variation": 0.9}])
def test_compiled_losses_and_gradients_are_those_of_a_cpu(loss: str | dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_CW, said_CW = (3 * torch.randn(70, 300, generator=generator) for _ in range(2))
    # Some of the target's probability lies outside the draft vocabulary.
    said = ExactDistribution(
        logits_CW=said_CW, normaliser_C=said_CW.logsumexp(dim=-1) + 0.1, best_C=said_CW.argmax(dim=-1)
    )
    there = replace(said, logits_CW=said_CW.cuda(), normaliser_C=said.normaliser_C.cuda(), best_C=said.best_C.cuda())
    ids, weight_C = torch.arange(300), torch.rand(70, generator=generator)
    expected = compare(logits_CW, said, weight_C, ids, row_loss_of(loss))
    found = torch.compile(compare)(logits_CW.cuda(), there, weight_C.cuda(), ids.cuda(), row_loss_of(loss))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-6)


def train_state_in(dtype: str, target: Target, like: TrainState, *, compiled: bool) -> TrainState:
    parts = TargetParts.of(target)
    config = config_for(parts, DrafterSettings(aux_layer_ids=tiny.AUX_IDS, draft_vocab_size=80), dtype=dtype)
    drafter = init_drafter(parts, config, torch.arange(80), seed=0)
    return TrainState("it", drafter, like.settings.model_copy(update={"compile": compiled}))


def test_a_compiled_drafter_in_bfloat16_starts_where_float32_starts_and_learns(tiny_target: Target) -> None:
    exact = train_state_of(tiny_target)
    (start,) = losses(tiny_target, exact, steps=1, compiled=False)
    target = replace(tiny_target, model=copy.deepcopy(tiny_target.model).to("cuda", torch.bfloat16))
    state = train_state_in("bfloat16", target, exact, compiled=True)
    assert isinstance(attention_for(batch_of([4], device="cuda"), torch.bfloat16), FlashUnrollAttention)
    assert {p.dtype for p in state.drafter.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in state.master_weights.values()} == {torch.float32}
    found = losses(target, state, steps=30, compiled=True)
    assert found[0] == pytest.approx(start, rel=0.02)
    assert found[-1] < 0.7 * found[0]
    for name, master in state.master_weights.items():
        assert torch.equal(state.drafter.get_parameter(name), master.bfloat16()), name


@pytest.mark.parametrize("layers", [1, 2])
def test_latent_attention_by_flash_is_that_written_out(layers: int) -> None:
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
    batch = batch_of(DOCUMENTS, device="cuda")
    drafter = drafter_of(mla=sizes, num_hidden_layers=layers, fc_norm=True, norm_output=True).cuda()
    aux = torch.randn(sum(DOCUMENTS), 3 * tiny.HIDDEN, generator=torch.Generator().manual_seed(0)).cuda()
    exact = unroll(drafter, batch, aux, depths=DEPTHS, attend=DenseUnrollAttention(batch))
    half = copy.deepcopy(drafter).bfloat16()
    ours = unroll(half, batch, aux.bfloat16(), depths=DEPTHS, attend=FlashUnrollAttention(batch))
    assert distance(ours, exact) < 0.05
    for model, normed in ((drafter, exact), (half, ours)):
        normed.float().square().mean().backward()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    name = "layers.0.self_attn.kv_b_proj.weight"
    assert distance(half.get_parameter(name).grad, drafter.get_parameter(name).grad) < 0.2  # type: ignore[arg-type]
