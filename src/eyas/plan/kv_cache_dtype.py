"""What keys and values are kept in, by vLLM's names for `--kv-cache-dtype`. It imports no torch."""

from typing import Literal

from eyas.errors import UserError

KVCacheKind = Literal["auto", "fp8"]
KV_CACHE_DTYPES: dict[str, KVCacheKind] = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}
"""auto: as passes compute them; fp8: 8-bit floats of the kind e4m3, the only kind that is served."""
FP8_BYTES = 1


def read_kv_cache_dtype(asked: str, name: str = "kv_cache_dtype") -> KVCacheKind:
    """One of the two, or a refusal of what `name` was given."""
    if asked not in KV_CACHE_DTYPES:
        raise UserError(f"{name} is {asked!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[asked]


def kv_element(kv_cache_dtype: KVCacheKind, computed: int) -> int:
    """Bytes of a number in the cache, where passes compute in numbers of so many bytes."""
    return FP8_BYTES if kv_cache_dtype == "fp8" else computed
