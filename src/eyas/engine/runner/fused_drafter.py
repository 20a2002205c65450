"""The drafter's pass in few operations; `drafter/model.py` defines what is computed.

A drafter's layer is so small that torch's operations between the products take longer than the products. So linears
with the same input are joined. On a CPU, norms, rotation and gates are compiled (`elementwise.py`), and if products and
attention are compiled too, a whole depth is one call (`eagle.py`). On a GPU they are Triton kernels
(`triton_drafter.py`).

Invariant: a fused drafter computes the same as its model, up to the order of sums. A trial at load ensures it, as for
targets (`kernels/llama/trial.py`); if the trial fails, the model itself runs.

Shapes: N tokens, M of them whose output is requested, S stored states, D drafter hidden, X concatenated auxiliary
states, A auxiliary states, W draft vocabulary, I intermediate size, B = H + G query and key heads, K head dim, E
outputs of a product.
"""

import logging

import torch
from torch import Tensor, nn

from eyas.drafter.attention import Attend, KeysAndValues
from eyas.drafter.model import DepthOutput, Drafter, RMSNorm
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.engine.runner.draft_passes import DraftPasses, EagleParts, NotEagleError
from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.choose import has_triton
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.elementwise import Elementwise, elementwise_for
from eyas.kernels.linear.embedding_table import look_up, table_of
from eyas.kernels.linear.served_linear import CompiledLinear
from eyas.kernels.llama.block import packed_products
from eyas.kernels.llama.cpu import Parts, load_layers
from eyas.kernels.llama.eagle import ChainsOutput, DraftHead, DraftLayer, StateFusion, Surroundings
from eyas.kernels.llama.rotary_table import RotaryTable

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest deviation from the model's own results, relative to their norm; other orders of sums stay below."""
QUANTISED_TOLERANCE = 2e-2
"""Tolerance for products that quantise their input, where rounding may flip the last bit."""


def fused_drafter(drafter: Drafter) -> DraftPasses:
    """Return the fused pass of a drafter if there is one and its trial succeeds, otherwise its own code."""
    if drafter.fc.weight.is_cuda:
        return _by_kernels(drafter)
    elementwise, own = elementwise_for(drafter.norm_weight), DraftPasses(drafter)
    if elementwise is None or drafter.embed_tokens is None or len(drafter.layers) > 1:
        return own
    table_VD = table_of(drafter.embed_tokens)
    if isinstance(table_VD, Tensor) and elementwise_for(table_VD) is None:
        return own  # the embeddings may be the target's, in a layout that compiled code would misread
    try:
        fused = _FusedDrafter(drafter, elementwise)
    except NotEagleError as reason:
        logger.info(f"the drafter runs by its own code: {reason}")
        return own
    is_right = _is_right(fused, own)
    fused.turns.forget()  # drop rotary entries up to the end of the context, which requests may never reach
    return fused if is_right else own


def _by_kernels(drafter: Drafter) -> DraftPasses:
    """Return the fused pass on a GPU, or the drafter's own code, with the reason logged."""
    if not has_triton():
        return DraftPasses(drafter)
    from eyas.engine.runner.triton_drafter import TritonDrafter, require_same  # torch for CPUs has no triton

    try:
        fused = TritonDrafter(drafter)
        require_same(fused, drafter)
    except Exception as reason:  # serve without the kernels, whatever failed
        logger.info(f"the drafter runs by its own code: {reason}")
        return DraftPasses(drafter)
    few = fused.with_few_rows()
    if few is None:
        return fused
    try:
        # A separate trial: trials have few tokens, so theirs would not reach kernels for longer passes.
        require_same(few, drafter)
    except Exception as reason:
        logger.info(f"the drafter runs without kernels of its own for few tokens: {reason}")
        return fused
    return few


class _FusedDrafter(DraftPasses):
    """A drafter with one layer, over the weights of a loaded drafter."""

    def __init__(self, drafter: Drafter, elementwise: Elementwise) -> None:
        config, self._parts = drafter.config, EagleParts.of(drafter)
        super().__init__(drafter)
        self._config, self.elementwise = config, elementwise
        self.token_W = drafter.vocab().target_ids_W
        assert drafter.embed_tokens is not None
        self._embedding_VD = table_of(drafter.embed_tokens)
        self.turns = RotaryTable(drafter.rope)
        self._like_NGK = torch.empty(0, config.num_key_value_heads, config.head_dim, dtype=torch.float32)
        self._in_one_call = self._compiled()

    def _compiled(self) -> DraftLayer | None:
        """Compile the layer into one call; None if a part of it has no compiled code."""
        compiled, config, own = load_layers(), self._config, self._parts
        layer, products = own.layer, packed_products(own.qkv, own.output, own.gate_up, own.down)
        if compiled is None or products is None:
            return None
        parts = Parts(
            products=products,
            attention_norm=None,
            mlp_norm=layer.post_attention_layernorm,
            scale=config.head_dim**-0.5,
            qk_norm=self._parts.qk_norm,
        )
        around = Surroundings(
            embedding_VD=self._embedding_VD,
            token_norm=layer.input_layernorm,
            hidden_norm=layer.hidden_norm,
            normed_residual=config.norm_before_residual,
            last_norm=self.model.norm,
            turns=self.turns,
        )
        return DraftLayer(parts, around, self._fusion(), self._head(), own.sizes, compiled)

    def _fusion(self) -> StateFusion | None:
        """Fusion of auxiliary states for the compiled layer; None if its product has no compiled code."""
        model = self.model
        if not isinstance(model.fc, CompiledLinear):
            return None
        norms = None if model.fc_norm is None else [norm for norm in model.fc_norm if isinstance(norm, RMSNorm)]
        assert norms is None or len(norms) == self._config.num_aux_hidden_states
        return StateFusion(
            linear=model.fc, all_norm=model.input_norm, norms=norms, count=self._config.num_aux_hidden_states
        )

    def _head(self) -> DraftHead | None:
        """Draft head for the compiled layer; None if its product has no compiled code."""
        model, config = self.model, self._config
        if not isinstance(model.lm_head, CompiledLinear):
            return None
        return DraftHead(
            linear=model.lm_head,
            target_id_W=self.token_W,
            logit_scale=config.logit_scale,
            feeds_normed=config.norm_output,
        )

    def fuse(self, aux_NX: Tensor) -> Tensor:
        """Norm the auxiliary states, if the drafter does, and combine them."""
        model = self.model
        if model.input_norm is not None:
            aux_NX = self._norm(model.input_norm, aux_NX)
        if model.fc_norm is not None:
            normed_NX = torch.empty_like(aux_NX)
            states, places = (x_NX.chunk(len(model.fc_norm), dim=1) for x_NX in (aux_NX, normed_NX))
            for norm, state_ND, out_ND in zip(model.fc_norm, states, places, strict=True):
                self._norm(norm, state_ND, out_ND)
            aux_NX = normed_NX
        return self._parts.fc(aux_NX, None)

    def step(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend) -> DepthOutput:
        output = None
        if self._in_one_call is not None and isinstance(attend, PagedAttention):
            output = self._in_one_call.run_depth(hidden.contiguous(), token_ids, positions, *self._asked(attend))
        return self._output_of(output or self._run(hidden, token_ids, positions, attend))

    def _run(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run a depth operation by operation; returns the output state, raw and normed."""
        config, layer, tokens = self._config, self._parts.layer, len(hidden)
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        both_NE, normed_ND = self._input(hidden, token_ids)
        qkv = self._parts.qkv(both_NE, None).view(tokens, -1, config.head_dim)
        turned = qkv.new_empty(tokens, heads + keys, config.head_dim)
        if self._parts.qk_norm is not None:
            self.elementwise.norm_heads(qkv[:, : heads + keys], self._parts.qk_norm.weight, self._parts.qk_norm.eps)
        self.elementwise.rotate(qkv[:, : heads + keys], *self.turns.at(positions), turned)
        attended = attend(0, turned[:, :heads], turned[:, heads:], qkv[:, heads + keys :])
        x_ND = self._parts.output(attended.reshape(tokens, -1), None)
        x_ND += normed_ND if config.norm_before_residual else hidden
        gate_up = self._parts.gate_up(self._norm(layer.post_attention_layernorm, x_ND), None)
        x_ND += self._parts.down(self.elementwise.gate(gate_up), None)
        return x_ND, self._norm(self.model.norm, x_ND)

    def read(self, aux_NX: Tensor, token_ids: Tensor, positions: Tensor, attend: PagedAttention) -> DepthOutput:
        """Run `fuse` and `step`, in one call if compiled."""
        output = None
        if self._in_one_call is not None:
            output = self._in_one_call.run_read(aux_NX.contiguous(), token_ids, positions, *self._asked(attend))
        return super().read(aux_NX, token_ids, positions, attend) if output is None else self._output_of(output)

    def chains(
        self, normed_RD: Tensor, feedback_RD: Tensor, attend: PagedAttention, depths: int
    ) -> ChainsOutput | None:
        """Draft `depths` tokens per row in one call, if compiled."""
        if self._in_one_call is None:
            return None
        positions = attend.metadata.position_N
        return self._in_one_call.run_chains(feedback_RD, normed_RD, positions, *self._asked(attend), depths)

    def _asked(self, attend: PagedAttention) -> tuple[AttentionBackend, KeysAndValues, int | None]:
        return attend.backend, attend.cache.memory(0, self._like_NGK, self._like_NGK), attend.window

    def _output_of(self, output: tuple[Tensor, Tensor]) -> DepthOutput:
        """Make a depth's output from its state, raw and normed."""
        state_ND, normed_ND = output
        return DepthOutput(normed=normed_ND, feedback=normed_ND if self._config.norm_output else state_ND)

    def remember(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> KeysAndValues:
        config, tokens = self._config, len(hidden)
        keys = config.num_key_value_heads
        kv = self._parts.kv(self._input(hidden, token_ids)[0], None).view(tokens, -1, config.head_dim)
        turned = kv.new_empty(tokens, keys, config.head_dim)
        if self._parts.qk_norm is not None:
            self.elementwise.norm_heads(kv[:, :keys], self._parts.qk_norm.weight[-keys:], self._parts.qk_norm.eps)
        self.elementwise.rotate(kv[:, :keys], *self.turns.at(positions), turned)
        return turned, kv[:, keys:]

    def _input(self, hidden_ND: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenate normed embedding and normed state; also returns the latter as a view."""
        tokens, size = hidden_ND.shape
        both_NE = hidden_ND.new_empty(tokens, 2 * size)
        embedded_ND = look_up(self._embedding_VD, token_N)
        self._norm(self._parts.layer.input_layernorm, embedded_ND, both_NE[:, :size])
        return both_NE, self._norm(self._parts.layer.hidden_norm, hidden_ND, both_NE[:, size:])

    def _norm(self, norm: nn.Module, x_ND: Tensor, out_ND: Tensor | None = None) -> Tensor:
        assert isinstance(norm, RMSNorm)
        return self.elementwise.norm(x_ND, norm.weight, norm.eps, out_ND)


@torch.inference_mode()
def _is_right(fused: _FusedDrafter, own: DraftPasses) -> bool:
    """Compare with the model: fuse states, run two depths, over blocks and at the end of the context."""
    config, count = own.model.config, 3
    generator = torch.Generator().manual_seed(0)
    aux_NX = torch.randn(count, config.num_aux_hidden_states * config.target_hidden_size, generator=generator)
    token_N = torch.randint(config.vocab_size, (count,), generator=generator)
    position_N = torch.tensor([0, 7, max(8, config.max_position_embeddings - 1)])
    rows = [AttentionRow(blocks=(1, 0), base=base, count=count) for base in (0, count)]
    passes = [AttentionMetadata.of([row], block_size=4, device=torch.device("cpu")) for row in rows]
    results = []
    for one in (fused, own):
        cache = KVCache(blocks=2, block_size=4)
        attends = [PagedAttention(cache, metadata) for metadata in passes]
        hidden_ND = one.fuse(aux_NX)
        first = one.step(hidden_ND, token_N, position_N, attends[0])
        second = one.step(first.feedback, token_N.flip(0), position_N + 1, attends[1])
        keys, values = (x.flatten(1) for x in one.remember(hidden_ND, token_N, position_N))
        if isinstance(one, _FusedDrafter):  # the single call must give equal results
            again = one.read(aux_NX, token_N, position_N, attends[0])
            if not (torch.equal(again.normed, first.normed) and torch.equal(again.feedback, first.feedback)):
                return False
        results.append((hidden_ND, first.normed, first.feedback, second.normed, second.feedback, keys, values))
    if not _chains_agree(fused, hidden_ND[:1], passes[0].block_size):
        return False
    tolerance = QUANTISED_TOLERANCE if getattr(own.model.fc, "rounds_inputs", False) else TOLERANCE
    return all(_near(ours, theirs, tolerance) for ours, theirs in zip(*results, strict=True))


def _chains_agree(fused: _FusedDrafter, state_1D: Tensor, block_size: int) -> bool:
    """Whether a chain drafted in one call, if supported, equals depth-by-depth drafting bit for bit."""
    cache, depths = KVCache(blocks=2, block_size=block_size), 3
    layouts = [
        AttentionMetadata.of(
            [AttentionRow(blocks=(1, 0), base=base, count=1)], block_size=block_size, device=torch.device("cpu")
        )
        for base in range(2, 2 + depths - 1)
    ]
    at_once = fused.chains(state_1D, state_1D, PagedAttention(cache, layouts[0]), depths)
    if at_once is None:
        return True
    normed_1D = feedback_1D = state_1D
    tokens, chances = list[list[int]](), list[list[float]]()
    for layout in (None, *layouts):
        if layout is not None:
            attend = PagedAttention(cache, layout)
            output = fused.step(feedback_1D, torch.tensor(tokens[-1]), layout.position_N, attend)
            normed_1D, feedback_1D = output.normed, output.feedback
        place_1, chance_1 = fused.elementwise.most_likely_and_chance(fused.logits(normed_1D).contiguous())
        tokens.append(fused.token_W[place_1].tolist())
        chances.append(chance_1.tolist())
    return (at_once.token_KR.tolist(), at_once.chance_KR.tolist()) == (tokens, chances)


def _near(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return bool(((ours - theirs).norm(dim=-1) <= tolerance * theirs.norm(dim=-1)).all())
