"""The EAGLE-1 drafter, which is EAGLE-2's too: it reads the target's last state after the last norm.

g = the target's state at depth 0, p of the previous depth later
x = fc([Emb(token); g])    r = x + Attention(x)    p = r + MLP(norm(r))    logits = target head(p)
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from eyas.drafter.attention import Attend, KeysAndValues
from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import Drafter, LaterLayer
from eyas.errors import UserError
from eyas.kernels.linear.embedding_table import EmbeddingTable
from eyas.kernels.linear.served_linear import ServedLinear


class Eagle1Drafter(Drafter):
    """An ordinary layer whose input is `fc` of embedding and state."""

    def __init__(self, config: DrafterConfig, *, own_embedding: bool = False, own_head: bool = True) -> None:
        super().__init__(config, own_embedding=own_embedding, own_head=own_head)
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.target_norm: nn.Module | None = None
        """Copy of the target's last norm; not saved with the drafter."""

    def share_target(
        self,
        embedding_VD: EmbeddingTable,
        head_VD: Tensor | ServedLinear,
        last_norm: nn.Module | None = None,
    ) -> Drafter:
        """Use the target's last norm, its head, and its embeddings if the drafter has none."""
        if last_norm is None:
            raise UserError("an EAGLE-1 drafter reads states after the target's last norm, and that norm was not found")
        weight = self.fc.weight
        self.target_norm = deepcopy(last_norm).to(weight.device, weight.dtype).eval().requires_grad_(False)
        return super().share_target(embedding_VD, head_VD)

    def fuse(self, aux_X: Tensor) -> Tensor:
        """Apply the target's last norm to its last state [..., X]."""
        if self.target_norm is None:
            raise UserError("the drafter has not been given the target's last norm; load it together with its target")
        return self.target_norm(aux_X)  # type: ignore[no-any-return]

    def remember(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, *, expanded: bool = False
    ) -> KeysAndValues:
        """Return the keys and values that `step` would compute."""
        layer = self.layers[0]
        assert isinstance(layer, LaterLayer)
        cos, sin = self.rope(positions, hidden.dtype)
        return layer.keys_and_values(self._joined(hidden, self._embedded(token_ids)), cos, sin)

    def _fc_inputs(self) -> int:
        return 2 * self.config.hidden_size

    def _first_layer(self) -> nn.Module:
        return LaterLayer(self.config, 0)

    def _run_first(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.layers[0](self._joined(hidden, embedded), cos, sin, attend)  # type: ignore[no-any-return]

    def _joined(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.fc(torch.cat([embedded, hidden], dim=-1))  # type: ignore[no-any-return]


def new_drafter(config: DrafterConfig, *, own_embedding: bool = False, own_head: bool = True) -> Drafter:
    """Return a drafter of the config's family, with weights yet to be set."""
    family = Eagle1Drafter if config.eagle1 else Drafter
    return family(config, own_embedding=own_embedding, own_head=own_head)
