"""A drafter in training: float32 master weights, a working copy in the precision of the computation, and an optimizer.

Small steps vanish in bfloat16, so the optimizer keeps float32 master weights, and the working copy is rounded from them
after each step: training then computes exactly what a server computes. In float32 both are the same tensors.

Shapes: S depths, D drafter state, W draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from eyas.drafter.model import Drafter
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.loss import Scores, compare, forward_loss, row_loss_of
from eyas.train.ranks import Ranks
from eyas.train.recipe import TrainSettings
from eyas.train.unroll import DrafterPasses, depth_weights


class TrainState:
    """One drafter, its master weights and its optimizer."""

    def __init__(self, name: str, drafter: Drafter, settings: TrainSettings) -> None:
        self.name = name
        self.drafter = drafter
        self.settings = settings
        self.target_ids_W = drafter.vocab().target_ids_W
        self._working = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self.master_weights = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self._working.items()
        }
        # A resumed run loads its weights later, and its anchor is still where it started.
        self._start = [w.detach().clone() for w in self.master_weights.values()] if settings.anchor else []
        for name_of, p in self._working.items():
            if self.master_weights[name_of] is not p:
                hook = partial(self._take_gradient, name_of)
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.AdamW(self._groups(), betas=settings.betas, eps=settings.eps, foreach=True)
        self._row_loss = row_loss_of(settings.loss)
        self.depth_weights = depth_weights(settings.depths, settings.gamma, settings.first_weight)
        if settings.compile:
            # Every depth of every drafter has its own graph, which is more than the default limit of 8.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._passes = DrafterPasses.of(drafter, compiled=settings.compile)
        self._compare = torch.compile(compare) if settings.compile else compare
        self.metrics_3S = self._zero_metrics()

    def backward(self, batch: TrainingBatch, features: Features, counts: Sequence[int], *, pack: int = 0) -> None:
        """Add one batch to the gradient; `counts` are the predictions of the whole step at each depth.

        `pack` is the batch's number in the run, which together with the seed determines the noise on its states.
        """
        weights = [weight / max(1, count) for weight, count in zip(self.depth_weights, counts, strict=False)]
        if self.settings.noise:
            features = features.with_noise(self._layer_ids(features), self.settings.noise, (self.settings.seed, pack))
        scores = self._forward_loss(batch, features, weights)
        scores.loss.backward()  # type: ignore[no-untyped-call]
        self.metrics_3S += torch.stack([scores.loss_S, scores.hit_SM.float().sum(dim=1), scores.overlap_S])

    def sum_gradients(self, ranks: Ranks) -> None:
        """Sum gradients and metrics over all processes."""
        if ranks.world > 1:
            ranks.sum_tensors([*self.gradients(), self.metrics_3S])

    @torch.no_grad()
    def _take_gradient(self, name: str, p: Tensor) -> None:
        """Move the gradient of a working weight to its master weight, once it is complete."""
        master = self.master_weights[name]
        if p.grad is not None:
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad += p.grad
            p.grad = None

    @torch.no_grad()
    def forward_loss(self, batch: TrainingBatch, features: Features, *, depths: int) -> Scores:
        """Score a batch to any depth, without gradients."""
        return self._forward_loss(batch, features, [1.0] * depths)

    def _forward_loss(self, batch: TrainingBatch, features: Features, weights: Sequence[float]) -> Scores:
        settings = self.settings
        return forward_loss(
            self.drafter,
            batch,
            features,
            target_ids_W=self.target_ids_W,
            layer_ids=self._layer_ids(features),
            weights=weights,
            row_loss=self._row_loss,
            chunk=settings.chunk,
            activation_checkpointing=settings.activation_checkpointing,
            compiled=settings.compile,
            passes=self._passes,
            compare=self._compare,
        )

    def _layer_ids(self, features: Features) -> tuple[int, ...]:
        return self.drafter.config.aux_layer_ids or features.aux_layer_ids

    def gradients(self) -> list[Tensor]:
        """Gradients of the master weights, in a fixed order; zeros for weights that the batches did not touch."""
        for master in self.master_weights.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.master_weights.values() if master.grad is not None]

    def gradient_norm(self) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.gradients())))
        return norm

    @torch.no_grad()
    def optimizer_step(self, norm: Tensor, scale: float) -> None:
        """Clip the gradient and step the optimizer, at `scale` times the peak learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * scale
        torch._foreach_mul_(self.gradients(), (self.settings.clip / (norm + 1e-12)).clamp(max=1.0))
        self.optimizer.step()
        if self._start:
            masters = [master.data for master in self.master_weights.values()]
            torch._foreach_lerp_(masters, self._start, self.settings.anchor * scale)
        self.zero_grad()
        self._round_working_copy()

    def zero_grad(self) -> None:
        for master in self.master_weights.values():
            master.grad = None
        self.metrics_3S = self._zero_metrics()

    @torch.no_grad()
    def _round_working_copy(self) -> None:
        for name, p in self._working.items():
            if self.master_weights[name] is not p:
                p.copy_(self.master_weights[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Master weights and moments: all that an exact resumption needs."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.master_weights.items():
            tensors[f"master.{name}"] = master.detach()
            for kind, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{kind}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for name, master in self.master_weights.items():
            master.copy_(tensors[f"master.{name}"])
            kinds = {key.partition(".")[0] for key in tensors if key.partition(".")[2] == name} - {"master"}
            if kinds:
                self.optimizer.state[master] = {
                    # The optimizer keeps its step count on the host.
                    kind: tensors[f"{kind}.{name}"].clone() if kind == "step" else tensors[f"{kind}.{name}"].to(master)
                    for kind in kinds
                }
        self._round_working_copy()

    def _groups(self) -> list[dict[str, object]]:
        """Parameter groups: the head starts from the target's rows and moves slower; norms are never decayed."""
        settings = self.settings
        groups = []
        for is_head in (False, True):
            for decays in (False, True):
                members = [
                    master
                    for name, master in self.master_weights.items()
                    if name.startswith("lm_head.") == is_head and (master.ndim > 1) == decays
                ]
                if members:
                    peak = settings.lr * (settings.head_lr_scale if is_head else 1.0)
                    decay = settings.weight_decay if decays else 0.0
                    groups.append({"params": members, "lr": peak, "peak": peak, "weight_decay": decay})
        return groups

    def _zero_metrics(self) -> Tensor:
        return torch.zeros(3, self.settings.depths, device=self.drafter.fc.weight.device)
