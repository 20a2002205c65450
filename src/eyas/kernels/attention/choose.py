"""Chooses the attention backend of a pass."""

from functools import cache
from importlib.util import find_spec

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.cpu import CompiledBackend, load_kernel
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.metadata import AttentionMetadata


def choose_backend(metadata: AttentionMetadata, *, sinks: int = 0) -> AttentionBackend:
    """The fastest backend for a pass on its device."""
    if metadata.slot_mapping_N.is_cuda and has_triton():
        from eyas.kernels.attention.triton import TritonBackend  # torch for CPUs comes without triton

        return TritonBackend(metadata, sinks=sinks)
    if metadata.slot_mapping_N.is_cpu:
        kernel, _ = load_kernel()
        if kernel is not None:
            return CompiledBackend(kernel, metadata, sinks=sinks)
    return DenseBackend(metadata, sinks=sinks)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; torch for CPUs comes without it."""
    return find_spec("triton") is not None
