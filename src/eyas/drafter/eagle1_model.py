"""EAGLE-1 drafters, which are EAGLE-2 too: they read the target's last state behind its last norm.

g = the target's last state behind its last norm, then p    x = fc([Emb(token); g])
r = x + Attention(x)    p = r + MLP(norm(r))                 logits = the target's head of p
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from eyas.drafter.attention import Attend, KeysAndValues
from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import Drafter, LaterLayer
from eyas.errors import UserError
from eyas.kernels.linear.quantised_linear import QuantisedEmbedding, QuantisedLinear


class Eagle1Drafter(Drafter):
    """An EAGLE-1 drafter: an ordinary layer whose input is the embedding and the state, combined by `fc`."""

    def __init__(self, config: DrafterConfig, *, own_embedding: bool = False, own_head: bool = True) -> None:
        super().__init__(config, own_embedding=own_embedding, own_head=own_head)
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.target_norm: nn.Module | None = None
        """A copy of the target's last norm, never saved with the drafter."""

    def share_target(
        self,
        embedding_VD: Tensor | QuantisedEmbedding,
        head_VD: Tensor | QuantisedLinear,
        last_norm: nn.Module | None = None,
    ) -> Drafter:
        """Use the target's last norm, and its embeddings and head where the drafter has none of its own."""
        if last_norm is None:
            raise UserError("an EAGLE-1 drafter reads states behind the target's last norm, and none was found")
        weight = self.fc.weight
        self.target_norm = deepcopy(last_norm).to(weight.device, weight.dtype).eval().requires_grad_(False)
        return super().share_target(embedding_VD, head_VD)

    def fuse(self, aux_X: Tensor) -> Tensor:
        """The target's last state [..., X] behind its last norm."""
        if self.target_norm is None:
            raise UserError("the drafter has not been given the target's last norm; load it together with its target")
        return self.target_norm(aux_X)  # type: ignore[no-any-return]

    def remember(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, *, expanded: bool = False
    ) -> KeysAndValues:
        """All that `step` leaves for later tokens to see."""
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
    """A drafter of the family that its config names, with weights yet to be set."""
    family = Eagle1Drafter if config.eagle1 else Drafter
    return family(config, own_embedding=own_embedding, own_head=own_head)
