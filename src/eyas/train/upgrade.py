"""Training that starts from an existing drafter: EAGLE-3 turned into EAGLE-3.1, and shapes that grow.

Shape and draft vocabulary are the checkpoint's unless the recipe asks for more layers, a wider MLP, more target states
or another draft vocabulary. It may also turn on the flags of EAGLE-3.1. Each flag changes the function; as much of the
change as possible is folded into the weights, so that training starts from a drafter that works (u are the weights of a
norm):

`fc_norm`: fc reads RMS(x_i) * u_i in place of x_i. u_i is the typical RMS of x_i over real text, the same for every
channel, so a typical token's input stays what it was. Tokens with unusually large states then look like the others,
which is what the norm is for. Typical is the median: attention sinks, one token in hundreds, have states a thousand
times as large and would spoil a mean. A norm over all states (`norm_before_fc`) is replaced: with s the RMS of the
concatenation and v_i its weights, fc read x_i * v_i / s, so u_i = v_i * typical(RMS of x_i / s).

`norm_output`: the next depth receives y = RMS(p) * u instead of p. The head reads y as well, so u moves into it:

    head' = head * u / c,  u' = c for every channel      same scores, and y' = c * p / rms(p) points where p does

The next depth's hidden_norm ignores length, so its attention reads exactly what it did. (Folding u into hidden_norm
instead would be wrong: depth 0 reads fc's output through the same weights.) With `norm_before_residual` the residual
is taken after hidden_norm too, and the upgrade changes nothing. Otherwise the residual is y' itself: its direction
is right, and its length is that of a typical p if c = typical(rms of p). Training only has to adapt to lengths that no
longer differ between tokens or grow with depth. The norms' epsilon is not accounted for; it matters for states near
zero only.

Growth adds weights that change nothing at first. Added MLP channels have gates of their own and a zero output; an added
layer has zeros after its attention and its MLP, so its residual passes through; fc has zero columns for an added
target state. Scores are those of the checkpoint up to the last bits of a sum, and gradients reach the zeros from the
first step on. So shapes can be compared without training each from scratch.

The head keeps its rows for tokens that stay in the draft vocabulary. Rows of new tokens are the target's rows times the
linear map that best turns the target's rows of the tokens that stay into the drafter's (least squares). A trained head
has moved away from the target's, and the target's own rows would outscore all others.

Shapes: T tokens, X concatenated auxiliary states, D drafter state, E target hidden size, V target and W draft
vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.drafter.checkpoint import Checkpoint, build_drafter, read_checkpoint
from eyas.drafter.config import DrafterConfig
from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.layer_json import kind_of
from eyas.drafter.model import Drafter
from eyas.drafter.vocab import DraftVocab, membership_from_target_ids, offsets_from_target_ids
from eyas.errors import UserError
from eyas.target.capture import check_aux_layer_ids
from eyas.target.facts import TargetFacts
from eyas.target.parts import TargetParts
from eyas.train.attention import attention_for
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.recipe import DrafterSettings

ChooseVocabulary = Callable[[int | None], Tensor]
"""Gives the target ids, ascending, of a draft vocabulary of that size; None: all of them."""
ReadText = Callable[[Sequence[int]], tuple[TrainingBatch, Features]]
"""Gives a batch of real text and its features with the states of these layers."""


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Checkpoint that fits its target and its recipe."""

    checkpoint: Checkpoint
    had_layer_ids: tuple[int, ...]
    """Layers that the checkpoint reads."""
    layer_ids: tuple[int, ...]
    """Layers that it is to read: these, and more if the recipe says so."""


def read_start(settings: DrafterSettings, facts: TargetFacts) -> StartingPoint:
    """Read `settings.init_from` and refuse a checkpoint that does not fit."""
    assert settings.init_from is not None
    checkpoint = read_checkpoint(settings.init_from)
    if checkpoint.config.eagle1:
        raise UserError(
            f"drafter.init_from is {settings.init_from}, an EAGLE-1 drafter, and eyas trains EAGLE-3 drafters, whose "
            "layers are of other shapes; leave drafter.init_from out"
        )
    had = _layers_of(checkpoint.config, settings, facts)
    _require_fit(checkpoint.config, settings, facts)
    layer_ids = _layers_to_read(had, checkpoint.config, settings, facts)
    return StartingPoint(checkpoint=checkpoint, had_layer_ids=had, layer_ids=layer_ids)


def init_from_checkpoint(
    target: TargetParts,
    settings: DrafterSettings,
    *,
    dtype: str,
    seed: int,
    read_text: ReadText,
    choose_vocabulary: ChooseVocabulary,
) -> Drafter:
    """Drafter of `settings.init_from` with flags and sizes of `settings`, ready to train on the target's device."""
    start = read_start(settings, target.facts)
    checkpoint = start.checkpoint
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in checkpoint.tensors.items()}
    if "lm_head.weight" not in tensors:
        # It drafted with the target's head, and training needs one of its own.
        tensors["lm_head.weight"] = target.head.weight_VD.float().cpu()
    checkpoint = replace(
        checkpoint, tensors=tensors, config=replace(checkpoint.config, aux_layer_ids=start.had_layer_ids, dtype=dtype)
    )
    if settings.fc_norm > checkpoint.config.fc_norm or settings.norm_output > checkpoint.config.norm_output:
        checkpoint = _upgraded(checkpoint, settings, target, read_text)
    checkpoint = _grown(
        checkpoint,
        layers=max(settings.layers, checkpoint.config.num_hidden_layers),
        intermediate_size=settings.intermediate_size or checkpoint.config.intermediate_size,
        seed=seed,
    )
    checkpoint = _with_layers_read(checkpoint, start.layer_ids)
    size = settings.draft_vocab_size
    if not isinstance(size, str) and (size or target.facts.vocab_size) != checkpoint.config.draft_vocab_size:
        checkpoint = _with_vocabulary(checkpoint, choose_vocabulary(size), target)
    drafter = _built(checkpoint, target)
    for name, parameter in drafter.named_parameters():  # embeddings are never trained, its own or the target's
        parameter.requires_grad_(not name.startswith("embed_tokens."))
    return drafter


def _built(checkpoint: Checkpoint, target: TargetParts) -> Drafter:
    dtype = getattr(torch, checkpoint.config.dtype)
    drafter = build_drafter(checkpoint).to(device=target.device, dtype=dtype)
    return drafter.share_target(target.embedding_VD.to(dtype), target.head.weight_VD)


def _upgraded(
    checkpoint: Checkpoint, settings: DrafterSettings, target: TargetParts, read_text: ReadText
) -> Checkpoint:
    """Turn on the flags of EAGLE-3.1 and fold what can be folded."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    assert config.aux_layer_ids is not None
    batch, features = read_text(config.aux_layer_ids)
    aux_TX = features.aux_TX
    if settings.norm_output and not config.norm_output:
        # Measured before fc_norm is added, while the inputs are those that the drafter was trained with.
        typical = float(_pre_norm_lengths(checkpoint, target, batch, aux_TX).median())
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * tensors["norm.weight"] / typical
        tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], typical)
        config = replace(config, norm_output=True)
    if settings.fc_norm and not config.fc_norm:
        aux_TX = aux_TX.float()
        length_T = _rms(aux_TX) if config.norm_before_fc else torch.ones(len(aux_TX), device=aux_TX.device)
        weight_X = tensors.pop("input_norm.weight", torch.ones(aux_TX.shape[-1]))
        parts = config.num_aux_hidden_states
        for i, (aux_TE, weight_E) in enumerate(zip(aux_TX.chunk(parts, dim=-1), weight_X.chunk(parts), strict=True)):
            tensors[f"fc_norm.{i}.weight"] = weight_E * float((_rms(aux_TE) / length_T).median())
        config = replace(config, fc_norm=True, norm_before_fc=False)
    return replace(checkpoint, config=config, tensors=tensors)


@torch.no_grad()
def _pre_norm_lengths(checkpoint: Checkpoint, target: TargetParts, batch: TrainingBatch, aux_TX: Tensor) -> Tensor:
    """RMS of the state that depth 0 feeds back, for every token that training reads."""
    drafter = _built(checkpoint, target)
    dtype, read_R = drafter.fc.weight.dtype, batch.slots.read_R
    attend = attention_for(batch, dtype, compiled=False).at(0)
    hidden_RD = drafter.fuse(aux_TX[read_R].to(dtype))
    output = drafter.step(hidden_RD, batch.ids_T[read_R + 1], batch.position_T[read_R], attend)
    return _rms(output.feedback)


def _grown(checkpoint: Checkpoint, *, layers: int, intermediate_size: int, seed: int) -> Checkpoint:
    """Checkpoint grown to `layers` layers and MLPs of `intermediate_size`; new weights are drawn by `seed`."""
    config = replace(checkpoint.config, num_hidden_layers=layers, intermediate_size=intermediate_size)
    if config == checkpoint.config:
        return checkpoint
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        newborn = new_drafter(config, own_embedding=False, own_head=False).state_dict()
    tensors = dict(checkpoint.tensors)
    for name, new in newborn.items():
        old = tensors.get(name)
        if old is not None and old.shape == new.shape:
            continue
        if name.rpartition(".")[0].endswith(("down_proj", "o_proj")):
            new = torch.zeros_like(new)
        if old is not None:
            new[tuple(slice(size) for size in old.shape)] = old
        tensors[name] = new
    return replace(checkpoint, config=config, tensors=tensors)


def _with_layers_read(checkpoint: Checkpoint, layer_ids: Sequence[int]) -> Checkpoint:
    """Checkpoint that reads the target states `layer_ids` (ascending), a superset of those it has read."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    had = config.aux_layer_ids
    assert had is not None
    if tuple(layer_ids) == had:
        return checkpoint
    assert not config.norm_before_fc, "a norm over all states depends on which they are"
    columns = dict(zip(had, tensors["fc.weight"].chunk(len(had), dim=1), strict=True))
    nothing = torch.zeros_like(columns[had[0]])
    tensors["fc.weight"] = torch.cat([columns.get(k, nothing) for k in layer_ids], dim=1)
    if config.fc_norm:
        norms = {k: tensors.pop(f"fc_norm.{i}.weight") for i, k in enumerate(had)}
        for i, k in enumerate(layer_ids):
            tensors[f"fc_norm.{i}.weight"] = norms[k] if k in norms else torch.ones_like(norms[had[0]])
    config = replace(config, aux_layer_ids=tuple(layer_ids), num_aux_hidden_states=len(layer_ids))
    return replace(checkpoint, config=config, tensors=tensors)


def _with_vocabulary(checkpoint: Checkpoint, target_ids_W: Tensor, target: TargetParts) -> Checkpoint:
    """Checkpoint, with a head of its own, that proposes these target ids (ascending)."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    head_WD = tensors["lm_head.weight"]
    vocab_size = config.vocab_size
    had_W = (
        DraftVocab.from_offsets(tensors["d2t"], vocab_size).target_ids_W if config.pruned else torch.arange(vocab_size)
    )
    row_V = torch.full((vocab_size,), -1)
    row_V[had_W] = torch.arange(len(had_W))
    row_W = row_V[target_ids_W]
    stays_W = row_W >= 0
    new_WD = head_WD.new_empty(len(target_ids_W), head_WD.shape[1])
    new_WD[stays_W] = head_WD[row_W[stays_W]]
    if not bool(stays_W.all()):
        theirs_VE = target.head.weight_VD.detach().double().cpu()
        map_ED = torch.linalg.lstsq(theirs_VE[had_W], head_WD.double(), driver="gelsd").solution
        new_WD[~stays_W] = (theirs_VE[target_ids_W[~stays_W]] @ map_ED).to(new_WD)
    tensors["lm_head.weight"] = new_WD
    config = replace(config, draft_vocab_size=len(target_ids_W))
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    if config.pruned:
        tensors["d2t"] = offsets_from_target_ids(target_ids_W)
        tensors["t2d"] = membership_from_target_ids(target_ids_W, vocab_size)
    return replace(checkpoint, config=config, tensors=tensors)


def _rms(x_TE: Tensor) -> Tensor:
    return x_TE.float().square().mean(dim=-1).sqrt()


def _layers_of(config: DrafterConfig, settings: DrafterSettings, facts: TargetFacts) -> tuple[int, ...]:
    """Layers that the checkpoint reads, by its config, else by the recipe, else by the target's default."""
    ids = config.aux_layer_ids or settings.aux_layer_ids or facts.default_aux_layer_ids()
    if len(ids) != config.num_aux_hidden_states:
        raise UserError(
            f"{settings.init_from} reads {config.num_aux_hidden_states} target states and does not say which; set "
            f"drafter.aux_layer_ids to that many layers (now {list(ids)})"
        )
    if max(ids) > facts.num_hidden_layers:
        raise UserError(
            f"{settings.init_from} reads layer {max(ids)} but {facts.source} has "
            f"{facts.num_hidden_layers}; it drafts for another one: correct target.source or drafter.init_from"
        )
    return tuple(ids)


def _layers_to_read(
    had: tuple[int, ...], config: DrafterConfig, settings: DrafterSettings, facts: TargetFacts
) -> tuple[int, ...]:
    """Layers that the recipe asks for, which may add some to those of the drafter."""
    wanted = settings.aux_layer_ids or had
    if wanted == had:
        return had
    if missing := sorted(set(had) - set(wanted)):
        raise UserError(
            f"drafter.aux_layer_ids is {list(wanted)} but {settings.init_from} was trained on layers {list(had)}, and "
            f"layers can be added, not taken away; leave drafter.aux_layer_ids out or add {missing}"
        )
    if config.norm_before_fc and (config.fc_norm or not settings.fc_norm):  # else fc_norm takes its place
        raise UserError(
            f"drafter.aux_layer_ids is {list(wanted)} but {settings.init_from} was trained on layers {list(had)} with "
            "one norm over all of them (norm_before_fc), which more would change; leave drafter.aux_layer_ids out"
        )
    return check_aux_layer_ids(wanted, facts.num_hidden_layers)


def _require_fit(config: DrafterConfig, settings: DrafterSettings, facts: TargetFacts) -> None:
    """Refuse a checkpoint of another target, and a recipe that the checkpoint cannot grow into."""
    source = settings.init_from
    for name, theirs, ours in (
        ("channels", config.target_hidden_size, facts.hidden_size),
        ("tokens in its vocabulary", config.vocab_size, facts.vocab_size),
    ):
        if theirs != ours:
            raise UserError(
                f"{source} drafts for a target with {theirs} {name} but {facts.source} has {ours}; "
                "correct target.source or drafter.init_from"
            )
    for key, least, has in (
        ("intermediate_size", settings.intermediate_size, config.intermediate_size),
        # One layer is the default of a recipe.
        ("layers", None if settings.layers == 1 else settings.layers, config.num_hidden_layers),
    ):
        if least is not None and least < has:
            raise UserError(
                f"drafter.{key} is {least} but {source} has {has}, and a drafter can grow, not shrink; leave "
                f"drafter.{key} out, set it to {has} or more, or start from scratch without drafter.init_from"
            )
    kind = kind_of(config).name
    if settings.model_type not in ("llama", kind):  # llama is the default of a recipe
        raise UserError(
            f"drafter.model_type is {settings.model_type} but {source} has {kind}; leave drafter.model_type out, set "
            f"it to {kind} or start from scratch without drafter.init_from"
        )
    for key in ("fc_norm", "norm_output"):
        if getattr(config, key) and not getattr(settings, key):
            raise UserError(
                f"drafter.{key} is false but {source} was trained with it, and without it would draft garbage; set "
                f"drafter.{key} to true: flags can be added to a drafter, not taken away"
            )
    for key in ("norm_before_residual", "norm_before_fc"):
        if getattr(settings, key) and not getattr(config, key):
            raise UserError(
                f"drafter.{key} is true but {source} was trained without it; leave drafter.{key} out: only fc_norm and "
                "norm_output can be added to a drafter"
            )
    if settings.norm_before_fc and settings.fc_norm and not config.fc_norm:
        raise UserError(
            f"drafter.norm_before_fc is true but drafter.fc_norm takes the place of that norm of {source}; leave "
            "drafter.norm_before_fc out"
        )
