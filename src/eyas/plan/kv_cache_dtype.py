"""KV cache dtypes, by vLLM's names for `--kv-cache-dtype`. No torch."""

from typing import Literal

from eyas.errors import UserError

KVCacheKind = Literal["auto", "fp8"]
KV_CACHE_DTYPES: dict[str, KVCacheKind] = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}
"""auto: the dtype that passes compute in; fp8: e4m3, the only 8-bit float that is served."""
FP8_BYTES = 1


def read_kv_cache_dtype(asked: str, name: str = "kv_cache_dtype") -> KVCacheKind:
    """Read the dtype that the option `name` was given."""
    if asked not in KV_CACHE_DTYPES:
        raise UserError(f"{name} is {asked!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[asked]


def kv_element(kv_cache_dtype: KVCacheKind, computed: int) -> int:
    """Bytes of a number in the KV cache, where passes compute in numbers of `computed` bytes."""
    return FP8_BYTES if kv_cache_dtype == "fp8" else computed
