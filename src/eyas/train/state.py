"""A drafter in training: weights in float32, a working copy in the precision of the computation, and its optimizer.

Small steps vanish in bfloat16, so the optimizer keeps float32 master weights and the working copy is rounded from them
after each step: what is trained is then exactly what a server computes with. In float32 the two are one.

Shapes: S depths, D drafter state, W draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from eyas.drafter.model import Drafter
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.forward_loss import forward_loss
from eyas.train.loss import row_loss_of
from eyas.train.noise import with_noise
from eyas.train.ranks import Ranks
from eyas.train.recipe import TrainSettings
from eyas.train.reduction import GradientReduction
from eyas.train.scoring import Scores, compare
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
        # What `load_state_dict` takes up later is not where the run started.
        self._start = [w.detach().clone() for w in self.master_weights.values()] if settings.anchor else []
        self._reduction: GradientReduction | None = None
        for name_of, p in self._working.items():
            p.register_post_accumulate_grad_hook(partial(self._take_gradient, name_of))  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.AdamW(self._groups(), betas=settings.betas, eps=settings.eps, foreach=True)
        self._row_loss = row_loss_of(settings.loss)
        self.depth_weights = depth_weights(settings.depths, settings.gamma, settings.first_weight)
        if settings.compile:
            # Every depth and drafter has a graph of its own; the default of 8 is for accidents.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._passes = DrafterPasses.of(drafter, compiled=settings.compile)
        self._compare = torch.compile(compare) if settings.compile else compare
        self.metrics_3S = self._zero_metrics()

    def backward(
        self,
        batch: TrainingBatch,
        features: Features,
        counts: Sequence[int],
        *,
        pack: int = 0,
        last_among: Ranks | None = None,
    ) -> None:
        """Add one batch to the gradient; `counts` are the predictions of the whole step at each depth.

        `pack` is its number in the run, which with the seed decides the noise on its states.
        With the step's last batch the gradients of the processes `last_among` are summed, as soon as each is whole;
        `wait_for_sum` says when they are.
        """
        weights = [weight / max(1, count) for weight, count in zip(self.depth_weights, counts, strict=False)]
        if self.settings.noise:
            features = with_noise(features, self._layer_ids(features), self.settings.noise, (self.settings.seed, pack))
        scores = self._forward_loss(batch, features, weights)
        if last_among is not None and last_among.world > 1:
            self._reduction = GradientReduction(list(self.master_weights.values()), last_among)
        scores.loss.backward()  # type: ignore[no-untyped-call]
        self.metrics_3S += torch.stack([scores.loss_S, scores.hit_SM.float().sum(dim=1), scores.overlap_S])
        if self._reduction is not None:
            self._reduction.flush()

    def wait_for_sum(self, ranks: Ranks) -> None:
        """Until gradients and metrics are those of all processes."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
        ranks.sum_tensors([self.metrics_3S])

    @torch.no_grad()
    def _take_gradient(self, name: str, p: Tensor) -> None:
        """A working weight's gradient is whole: the master's has it from here on."""
        master = self.master_weights[name]
        if master is not p and p.grad is not None:
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad += p.grad
            p.grad = None
        if self._reduction is not None:
            self._reduction.ready(master)

    @torch.no_grad()
    def forward_loss(self, batch: TrainingBatch, features: Features, *, depths: int) -> Scores:
        """Score a batch without learning from it, to any depth."""
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
        """The layers whose states the drafter reads."""
        return self.drafter.config.aux_layer_ids or features.aux_layer_ids

    def gradients(self) -> list[Tensor]:
        """Gradients of the master weights, in a fixed order; zeros where nothing was learnt."""
        for master in self.master_weights.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.master_weights.values() if master.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Length of the whole gradient."""
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.gradients())))
        return norm

    @torch.no_grad()
    def optimizer_step(self, norm: Tensor, scale: float) -> None:
        """One optimizer step with the gradient clipped, at `scale` of the peak learning rate."""
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
        """Drop gradients and sums."""
        for master in self.master_weights.values():
            master.grad = None
        self.metrics_3S = self._zero_metrics()

    @torch.no_grad()
    def _round_working_copy(self) -> None:
        """Round the working copy from the master weights."""
        for name, p in self._working.items():
            if self.master_weights[name] is not p:
                p.copy_(self.master_weights[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Masters and moments: all that is needed to go on as if nothing had happened."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.master_weights.items():
            tensors[f"master.{name}"] = master.detach()
            for kind, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{kind}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up a state."""
        for name, master in self.master_weights.items():
            master.copy_(tensors[f"master.{name}"])
            kinds = {key.partition(".")[0] for key in tensors if key.partition(".")[2] == name} - {"master"}
            if kinds:
                self.optimizer.state[master] = {
                    # The count of steps stays on the host, where the optimizer keeps it.
                    kind: tensors[f"{kind}.{name}"].clone() if kind == "step" else tensors[f"{kind}.{name}"].to(master)
                    for kind in kinds
                }
        self._round_working_copy()

    def _groups(self) -> list[dict[str, object]]:
        """The head starts from the target's rows and moves slower; norms are never decayed."""
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
