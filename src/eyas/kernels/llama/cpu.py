"""All layers of a pass in one call of compiled code (`llama/cpu.c`), if each of their steps is compiled.

Between the products of a small model, Python takes longer than it seems: the CPU's caches are full of weights. Results
equal those of `block.py` and of the fused drafter, step by step, to the last bit.

Shapes: N tokens, D hidden size, G key heads, K head dim, R rotary dim, T rotations, X concatenated auxiliary states, E
inputs of a product.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.cpu import AttentionKernel, CompiledBackend, load_kernel
from eyas.kernels.elementwise import Activation, Elementwise, load_elementwise
from eyas.kernels.linear.embedding_table import EmbeddingTable, packed_table, table_addresses
from eyas.kernels.linear.served_linear import CompiledLinear, ProductWeight
from eyas.kernels.native import load_native

SOURCE = Path(__file__).with_name("cpu.c")
FEW_TOKENS = 16
"""The workspace of a pass of up to this many tokens is kept for the next pass."""


class Norm(Protocol):
    """A root-mean-square norm."""

    @property
    def weight(self) -> Tensor:
        """[D], or [B, K] for heads."""

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """The sizes of every layer."""

    heads: int
    key_heads: int
    head_dim: int
    rotary_dim: int
    """The number of leading entries of a head that are rotated."""
    intermediate: int
    """Intermediate size of dense layers; 0 if there are none."""


class PackedProducts(NamedTuple):
    """The products of a layer."""

    qkv: CompiledLinear
    output: CompiledLinear
    gate_up: CompiledLinear
    down: CompiledLinear


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """One layer."""

    products: PackedProducts
    attention_norm: Norm | None
    """None if the layer's products are given their input already."""
    mlp_norm: Norm
    scale: float
    qk_norm: Norm | None = None
    rotation: int = 0
    """The index of the layer's rotation in the pass."""
    window: int | None = None
    softcap: float | None = None
    sink_logit_H: Tensor | None = None
    """Attention sink logits per head, float32."""
    attention_output_norm: Norm | None = None
    """The norm of the attention output, before it is added to the state."""
    activation: Activation = Activation.SILU
    mlp_output_norm: Norm | None = None
    """The norm of the feed-forward output, before it is added to the state."""


_STEPS = (
    *("norm", "product", "quantised_product", "norm_heads", "rotate", "attend", "gate"),
    *("most_likely", "advance", "packed_rows"),
)
_NORMS = ("attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm", "qk_norm")


class _Steps(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _STEPS)


class NormWeight(ctypes.Structure):
    """`struct norm`."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))

    @classmethod
    def of(cls, norm: Norm | None) -> "NormWeight":
        """The weight must stay where it is."""
        return cls(None, 0.0) if norm is None else cls(norm.weight.data_ptr(), norm.eps)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, NormWeight) for name in _NORMS),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "sink")),
        *((name, ProductWeight) for name in PackedProducts._fields),
        *((name, ctypes.c_int64) for name in ("window", "rotation", "activation")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _Ends(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embedding", "packed_embedding", "token", "kept")),
        ("norm", NormWeight),
        ("head", ProductWeight),
        *((name, ctypes.c_void_p) for name in ("normed", "logits")),
        ("kept_count", ctypes.c_int64),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Ends:
    """Embedding, last norm and head of a target."""

    embedding_VD: EmbeddingTable
    norm: Norm
    head: CompiledLinear

    @property
    def linears(self) -> list[CompiledLinear]:
        """Layers to multiply by or look up in."""
        table = packed_table(self.embedding_VD)
        return [self.head] if table is None else [self.head, table]


_POINTERS = ("steps", "layers", "waves", "wave_ends", "states", "cos", "sin", "input", "x", "memory", "spent")
PHASES = ("products", "head", "attention", "norms", "gates")
"""Parts of a pass that can be timed."""
_NUMBERS = (
    *("layer_count", "state_stride"),
    *("tokens", "hidden", "heads", "key_heads", "head_dim", "rotary_dim", "intermediate", "threads"),
)


class _Call(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int64) for name in _NUMBERS))


@dataclass(frozen=True, eq=False)
class Compiled:
    """The compiled loop and the compiled steps that it calls."""

    library: ctypes.CDLL
    elementwise: Elementwise
    attention: AttentionKernel

    def steps_with(self, linears: Sequence[CompiledLinear]) -> _Steps:
        steps, attention = self.elementwise.library, self.attention.library
        functions = {
            "norm": steps.rms_norm,
            "norm_heads": steps.norm_heads,
            "rotate": steps.rotate,
            "attend": attention.attend_blocks,
            "gate": steps.gated,
            "most_likely": steps.most_likely,
            "advance": attention.advance_blocks,
        }
        for linear in linears:
            functions |= linear.steps
        return _Steps(**{name: ctypes.cast(function, ctypes.c_void_p) for name, function in functions.items()})


@cache
def load_layers() -> Compiled | None:
    """Load the loop; None if there is no compiler, or a step failed its trial."""
    library, _ = load_native(SOURCE)
    elementwise, (attention, _) = load_elementwise(), load_kernel()
    if library is None or elementwise is None or attention is None:
        return None
    if library.run_bytes() != ctypes.sizeof(_Call) or library.layer_bytes() != ctypes.sizeof(_Layer):
        return None
    library.numbers_per_token.argtypes = [ctypes.c_long] * 5
    library.numbers_per_token.restype = ctypes.c_long
    if library.ends_bytes() != ctypes.sizeof(_Ends):
        return None
    for function, pointers in (
        (library.run_layers, 1),
        (library.run_target, 2),
        (library.run_depth, 2),
        (library.run_read, 3),
        (library.run_chain, 3),
    ):
        function.argtypes = [ctypes.c_void_p] * pointers
        function.restype = None
    return Compiled(library, elementwise, attention)


class Waves(NamedTuple):
    """Arguments of the compiled attention in a pass."""

    all: "ctypes.Array[ctypes.c_void_p]"
    ends: "ctypes.Array[ctypes.c_int64]"
    """For each window, the index after its last wave."""


class Layers:
    """Runs the layers of one model."""

    def __init__(
        self,
        parts: Sequence[Parts],
        sizes: LlamaSizes,
        compiled: Compiled,
        others: Sequence[CompiledLinear] = (),
        ends: Ends | None = None,
    ) -> None:
        """`others` are further linears of the pass; with `ends`, whole passes run."""
        others = [*others, *(ends.linears if ends is not None else ())]
        linears = [*(linear for part in parts for linear in part.products), *others]
        self.ends = ends
        self._parts, self.sizes, self.library, self._steps = (
            parts,
            sizes,
            compiled.library,
            compiled.steps_with(linears),
        )
        self._hidden = parts[0].products.down.out_features
        self._windows = list(dict.fromkeys(part.window for part in parts))
        self._layers = (_Layer * len(parts))(*(_layer(part, self._windows.index(part.window)) for part in parts))
        self.numbers_per_token: int = compiled.library.numbers_per_token(
            *(self._hidden, sizes.heads, sizes.key_heads, sizes.head_dim, sizes.intermediate)
        ) + max(linear.workspace_bytes // 4 for linear in linears)
        self._kv: list[Tensor] = []
        self._kv_from: Mapping[int, tuple[Tensor, Tensor]] = {}
        """The mapping that they came from: a cache keeps its tensors."""
        self._memory = torch.empty(0, dtype=torch.float32)
        qk, qkv = ((sizes.heads + more * sizes.key_heads) * sizes.head_dim for more in (1, 2))
        self._strides = (qk, sizes.head_dim, qk, sizes.head_dim, qkv, sizes.head_dim)
        self.spent: ctypes.Array[ctypes.c_double] | None = None
        """Seconds per phase, if somebody counts them."""

    def run_target(
        self,
        ids_N: Tensor,
        x_ND: Tensor,
        cos_TNR: Tensor,
        sin_TNR: Tensor,
        attention: AttentionBackend,
        kv: Mapping[int, tuple[Tensor, Tensor]],
        states: Mapping[int, Tensor],
        keep_M: Tensor | None,
        logits_MV: Tensor,
    ) -> bool:
        """Run a whole pass, from ids to the logits of all or some tokens, with x_ND as memory; otherwise like `run`."""
        ends, ids_N, keep_M = self.ends, ids_N.contiguous(), None if keep_M is None else keep_M.contiguous()
        wanted = ids_N if keep_M is None else keep_M
        assert ends is not None, "there are none"
        assert logits_MV.is_contiguous()
        assert ids_N.dtype == wanted.dtype == torch.int64
        count = wanted.shape[0]
        normed_MD = torch.empty(count, self._hidden, dtype=torch.float32)
        around = _Ends(
            *table_addresses(ends.embedding_VD),
            *(ids_N.data_ptr(), None if keep_M is None else keep_M.data_ptr(), NormWeight.of(ends.norm)),
            *(ends.head.product_weight(), normed_MD.data_ptr(), logits_MV.data_ptr(), count),
        )
        return self.run(x_ND, cos_TNR, sin_TNR, attention, kv, states, around)

    def run(
        self,
        x_ND: Tensor,
        cos_TNR: Tensor,
        sin_TNR: Tensor,
        attention: AttentionBackend,
        kv: Mapping[int, tuple[Tensor, Tensor]],
        states: Mapping[int, Tensor],
        around: _Ends | None = None,
    ) -> bool:
        """Run x_ND through all layers, in place; False, with nothing done, if the attention is not compiled.

        `states` has memory for x before the given layers, or after the last: parts [N, D] of one tensor [N, X].
        """
        assert all(x.is_contiguous() for x in (x_ND, cos_TNR, sin_TNR))
        tokens = x_ND.shape[0]
        waves = self.waves(attention, kv, tokens, self._windows)
        if waves is None:
            return False
        memory = self._workspace(tokens * self.numbers_per_token)
        noted = (ctypes.c_void_p * (len(self._parts) + 1))() if states else None
        if noted is not None:
            for layer, state in states.items():
                noted[layer] = state.data_ptr()
        run = self.prepared(
            waves,
            tokens=tokens,
            x=x_ND.data_ptr(),
            cos=cos_TNR.data_ptr(),
            sin=sin_TNR.data_ptr(),
            memory=memory.data_ptr(),
            states=None if noted is None else ctypes.addressof(noted),
            state_stride=next((state.stride(0) for state in states.values()), 0),
        )
        if around is None:
            self.library.run_layers(ctypes.addressof(run))
        else:
            self.library.run_target(ctypes.addressof(run), ctypes.addressof(around))
        return True

    def _workspace(self, numbers: int) -> Tensor:
        """Memory for a pass; a short pass reuses the last one's, since fresh pages are slow."""
        if numbers > FEW_TOKENS * self.numbers_per_token:
            return torch.empty(numbers, dtype=torch.float32)
        if len(self._memory) < numbers:
            self._memory = torch.empty(numbers, dtype=torch.float32)
        return self._memory

    def waves(
        self,
        attention: AttentionBackend,
        kv: Mapping[int, tuple[Tensor, Tensor]],
        tokens: int,
        windows: Sequence[int | None],
        *,
        ahead: int = 0,
    ) -> "Waves | None":
        """Prepare the compiled attention, and point all layers to their keys and values; None if it cannot run.

        `windows` are the distinct windows of the layers. All layers have the same number of slots. Chains may advance
        by `ahead`.
        """
        if not isinstance(attention, CompiledBackend):
            return None
        first, _ = kv[0]
        if first.dtype != torch.float32:
            return None
        if kv is not self._kv_from or first is not self._kv[0]:
            given = [x for layer in range(len(self._parts)) for x in kv[layer]]
            if len(given) != len(self._kv) or any(x is not y for x, y in zip(given, self._kv, strict=True)):
                self._take(given)
            self._kv_from = kv
        sizes, slots = self.sizes, first.shape[1]
        q_shape, v_shape = ((tokens, heads, sizes.head_dim) for heads in (sizes.heads, sizes.key_heads))
        by_window = [attention.waves(q_shape, v_shape, self._strides, slots, window, ahead=ahead) for window in windows]
        waves = [wave for several in by_window for wave in several]
        ends = accumulate(map(len, by_window))
        return Waves((ctypes.c_void_p * len(waves))(*waves), (ctypes.c_int64 * len(by_window))(*ends))

    def prepared(
        self,
        waves: "Waves",
        *,
        tokens: int,
        x: int,
        cos: int,
        sin: int,
        memory: int,
        first_input: int | None = None,
        states: int | None = None,
        state_stride: int = 0,
    ) -> _Call:
        """The arguments of a run; the addresses must stay valid until it is over."""
        sizes = self.sizes
        return _Call(
            *(ctypes.addressof(self._steps), ctypes.addressof(self._layers)),
            *(ctypes.addressof(waves.all), ctypes.addressof(waves.ends), states),
            *(cos, sin, first_input, x, memory, None if self.spent is None else ctypes.addressof(self.spent)),
            *(len(self._parts), state_stride, tokens, self._hidden),
            *(sizes.heads, sizes.key_heads, sizes.head_dim, sizes.rotary_dim, sizes.intermediate),
            torch.get_num_threads(),
        )

    def _take(self, kv: list[Tensor]) -> None:
        """Use these keys and values, in turn for every layer, and hold them until others come."""
        assert all(x.dtype == torch.float32 and x.is_contiguous() for x in kv)
        for layer, keys, values in zip(self._layers, kv[::2], kv[1::2], strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._kv = kv


def _layer(parts: Parts, window: int) -> _Layer:
    return _Layer(
        **{name: NormWeight.of(getattr(parts, name)) for name in _NORMS},
        **{name: packed.product_weight() for name, packed in parts.products._asdict().items()},
        sink=None if parts.sink_logit_H is None else parts.sink_logit_H.data_ptr(),
        window=window,
        rotation=parts.rotation,
        activation=parts.activation,
        scale=parts.scale,
        softcap=parts.softcap or 0.0,
    )
