"""A drafter in training: weights in float32, a working copy in the precision of the computation, and its optimiser.

Small steps vanish in bfloat16, so the optimiser keeps float32 masters and the working copy is rounded from them after
each step: what is trained is then exactly what a server computes with. In float32 the two are one.

Shapes: S depths, D drafter state, W draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyas.drafter.model import Drafter
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.judge import judge
from eyas.train.loss import find_loss
from eyas.train.scoring import Scores, compare
from eyas.train.unroll import Step, depth_weights


@dataclass(frozen=True, kw_only=True)
class Regime:
    """How one drafter is trained."""

    depths: int
    gamma: float
    loss: str
    lr: float
    head_lr_scale: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    chunk: int
    checkpointed: bool
    compiled: bool


class Trainee:
    """One drafter, its masters and its optimiser."""

    def __init__(self, name: str, drafter: Drafter, regime: Regime) -> None:
        self.name = name
        self.drafter = drafter
        self.regime = regime
        self.kept_W = drafter.vocab().target_ids_W
        self._working = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self._working.items()
        }
        self.optimiser = torch.optim.AdamW(self._groups(), betas=regime.betas, eps=regime.eps, foreach=True)
        self._row_loss = find_loss(regime.loss)
        if regime.compiled:
            # Every depth, drafter and length of document has a graph of its own; the default of 8 is for accidents.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._step: Step = torch.compile(drafter.step, dynamic=False) if regime.compiled else drafter.step
        self._compare = torch.compile(compare, dynamic=False) if regime.compiled else compare
        self.sums_3S = self._no_sums()

    def learn(self, batch: TrainingBatch, features: Features, counts: Sequence[int]) -> None:
        """Add one batch to the gradient; `counts` are the predictions of the whole step at each depth."""
        weights = [
            weight / max(1, count)
            for weight, count in zip(depth_weights(self.regime.depths, self.regime.gamma), counts, strict=False)
        ]
        scores = self._score(batch, features, weights)
        scores.loss.backward()  # type: ignore[no-untyped-call]
        self.sums_3S += torch.stack([scores.loss_S, scores.hit_SM.float().sum(dim=1), scores.overlap_S])
        for name, p in self._working.items():
            master = self.masters[name]
            if master is p or p.grad is None:
                continue
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad += p.grad
            p.grad = None

    @torch.no_grad()
    def judge(self, batch: TrainingBatch, features: Features, *, depths: int) -> Scores:
        """Score a batch without learning from it, to any depth."""
        return self._score(batch, features, [1.0] * depths)

    def _score(self, batch: TrainingBatch, features: Features, weights: Sequence[float]) -> Scores:
        regime = self.regime
        return judge(
            self.drafter,
            batch,
            features,
            kept_W=self.kept_W,
            layer_ids=self.drafter.config.aux_layer_ids or features.aux_layer_ids,
            weights=weights,
            row_loss=self._row_loss,
            chunk=regime.chunk,
            checkpointed=regime.checkpointed,
            compiled=regime.compiled,
            step=self._step,
            compare=self._compare,
        )

    def gradients(self) -> list[Tensor]:
        """Gradients of the masters, in a fixed order; zeros where nothing was learnt."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Length of the whole gradient."""
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.gradients())))
        return norm

    @torch.no_grad()
    def move(self, norm: Tensor, scale: float) -> None:
        """One optimiser step with the gradient clipped, at `scale` of the peak learning rate."""
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak"] * scale
        torch._foreach_mul_(self.gradients(), (self.regime.clip / (norm + 1e-12)).clamp(max=1.0))
        self.optimiser.step()
        self.forget()
        self.refresh()

    def forget(self) -> None:
        """Drop gradients and sums."""
        for master in self.masters.values():
            master.grad = None
        self.sums_3S = self._no_sums()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the working copy from the masters."""
        for name, p in self._working.items():
            if self.masters[name] is not p:
                p.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """Masters and moments: all that is needed to go on as if nothing had happened."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            tensors[f"master.{name}"] = master.detach()
            for kind, value in self.optimiser.state.get(master, {}).items():
                tensors[f"{kind}.{name}"] = value
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up a state."""
        for name, master in self.masters.items():
            master.copy_(tensors[f"master.{name}"])
            kinds = {key.partition(".")[0] for key in tensors if key.partition(".")[2] == name} - {"master"}
            if kinds:
                self.optimiser.state[master] = {
                    # The count of steps stays on the host, where the optimiser keeps it.
                    kind: tensors[f"{kind}.{name}"].clone() if kind == "step" else tensors[f"{kind}.{name}"].to(master)
                    for kind in kinds
                }
        self.refresh()

    def _groups(self) -> list[dict[str, object]]:
        """The head starts from the target's rows and moves slower; norms are never decayed."""
        regime = self.regime
        groups = []
        for is_head in (False, True):
            for decays in (False, True):
                members = [
                    master
                    for name, master in self.masters.items()
                    if name.startswith("lm_head.") == is_head and (master.ndim > 1) == decays
                ]
                if members:
                    peak = regime.lr * (regime.head_lr_scale if is_head else 1.0)
                    decay = regime.weight_decay if decays else 0.0
                    groups.append({"params": members, "lr": peak, "peak": peak, "weight_decay": decay})
        return groups

    def _no_sums(self) -> Tensor:
        return torch.zeros(3, self.regime.depths, device=self.drafter.fc.weight.device)
