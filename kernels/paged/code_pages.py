"""Pages of 8 or 4 bits: codes and scales as kernels/kv_cache has them, in units of 16 tokens.

    k_pages, v_pages  uint8 (n_pages, n_kv_heads, units, bytes of a unit): the codes of 16 tokens, in the order in which
                      the lanes of an mma take them (kernels/kv_cache/layout.py: there a unit is a tile)
    scales            float16 (n_pages, n_kv_heads, units, 2, 16 · groups): of a unit's keys and of its values, in one
                      piece

A token has scales of its own: one for all channels of a head in 8 bits, one for 32 of them in 4 (axis="token"). So a
token that comes changes no code of another, whatever it is, and a unit may be filled one token at a time. Scales of
channels, which chapter 09 also has, belong to whole groups of tokens; they are not offered here.
"""

import functools
from pathlib import Path

import torch

from kernels.kv_cache import layout
from kernels.kv_cache.fixed import PEAK
from kernels.kv_cache.layout import TILE as UNIT
from kernels.kv_cache.quantization import _peak as peak_of
from kernels.kv_cache.quantization import lift
from kernels.kv_cache.rounding import default_group
from kernels.paged.arguments import PAGE_SIZES, expect_tables
from lab import cuda
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, expect_apart, expect_no_gradient

HERE = Path(__file__).resolve().parent
SOURCES = ("kernels/paged/write_codes.cu", "kernels/paged/code_pages.py")
BITS = (8, 4, "fp8")
WARPS = 8  # of a block of write_codes.cu
WRITES = Calls("paged.write, codes", outs=3)
LIFT = lift(PEAK)  # of weights: powers of two that keep their products with scales below 4 · PEAK in float16's range


def expect_bits(where, bits, page_size):
    """Raise unless pages of this size can hold so many bits."""
    if isinstance(bits, bool) or bits not in (16, *BITS):
        raise ValueError(f"{where}: bits must be 16, 8, 4 or 'fp8', got {bits!r}")
    if bits != 16 and page_size % UNIT:
        sizes = ", ".join(str(size) for size in PAGE_SIZES if size % UNIT == 0)
        raise ValueError(
            f"{where}: page_size must be one of {sizes} with bits={bits!r}, as codes lie in units of {UNIT} tokens, "
            f"got {page_size}"
        )


def make(n_pages, n_kv_heads, page_size, head_dim, bits, device):
    """(k_pages, v_pages, scales) that hold zeros."""
    *shapes, of_scales = _shapes(n_pages, n_kv_heads, page_size, head_dim, bits)
    return *(torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes), torch.zeros(
        of_scales, dtype=torch.float16, device=device
    )


def token_bytes(head_dim, bits):
    """Bytes of one token of a kv head, keys and values and their scales."""
    return 2 * (layout.tile_bytes(bits, head_dim) // UNIT + 2 * (head_dim // default_group(bits, "token", head_dim)))


def _shapes(n_pages, n_kv_heads, page_size, head_dim, bits):
    units, groups = page_size // UNIT, head_dim // default_group(bits, "token", head_dim)
    codes = n_pages, n_kv_heads, units, layout.tile_bytes(bits, head_dim)
    return codes, codes, (n_pages, n_kv_heads, units, 2, UNIT * groups)


def expect_pool(where, cache, like):
    """Raise unless the tensors of a cache of codes are what they were made as, on the device of `like`."""
    n_pages, size = len(cache.k_pages), (cache.n_kv_heads, cache.page_size, cache.head_dim, cache.bits)
    names, dtypes = ("k_pages", "v_pages", "scales"), (torch.uint8, torch.uint8, torch.float16)
    for name, dtype, shape in zip(names, dtypes, _shapes(n_pages, *size)):
        value = getattr(cache, name)
        expect(where, name, value, like, shape, (dtype,))
        if value.data_ptr() % 16:
            raise ValueError(f"{where}: {name} must start at an address divisible by 16, got {value.data_ptr():#x}")
    expect(where, "table", cache.table, like, ("max_requests", "max_pages"), (torch.int32,))
    expect(where, "lens", cache.lens, like, (len(cache.table),), (torch.int32,))


def expect_new(where, cache, k, v):
    """On the CPU: raise for a number that cannot be stored, with its first index. A card is not waited for."""
    for name, new in (("k", k), ("v", v)):
        if new.is_cpu and new.data_ptr():
            peak_of(where, name, new, cache.bits)


def write(cache, slots, k, v, pdl):
    """PagedCache.write for a cache of codes."""
    pages, rest = (cache.k_pages, cache.v_pages, cache.scales), (k, v, cache.table, cache.lens, slots)
    if WRITES.run((bool(pdl), cache.bits), *pages, *rest) is not None:
        return
    _expect_write("write", cache, slots, k, v)
    with WRITES.preparing((bool(pdl), cache.bits), pages, pages, rest):
        launch_write(cache, slots, k, v, pdl=bool(pdl))


def _expect_write(where, cache, slots, k, v):
    expect(where, "k", k, cache.lens, ("n_requests", "new", cache.n_kv_heads, cache.head_dim), (cache.dtype,))
    expect(where, "v", v, cache.lens, tuple(k.shape), (cache.dtype,))
    expect_pool(where, cache, k)
    expect(where, "slots", slots, k, (len(k),), (torch.int32,))
    for name in ("k_pages", "v_pages", "scales"):
        pages = getattr(cache, name)
        expect_no_gradient(where, pages, name)
        expect_apart(where, name, pages, k=k, v=v, table=cache.table, lens=cache.lens, slots=slots)
    if k.is_cpu and k.data_ptr():
        expect_tables(where, len(cache.k_pages), cache.page_size, cache.table, cache.lens, slots)
        short = [int(n) for n in cache.lens[slots[slots >= 0].long()] if n < k.shape[1]]
        if short:
            raise ValueError(f"{where}: k must have no more new tokens than a request has in all, got {short[0]} of "
                             f"{k.shape[1]}: reserve comes first")  # fmt: skip
        expect_new(where, cache, k, v)


def launch_write(cache, slots, k, v, *, pdl=False, **options):
    """write_codes.cu on tensors that were looked at."""
    n_requests, new, n_kv_heads, head_dim = k.shape
    touched = (new + UNIT - 2) // UNIT + 1
    blocks = -(-n_requests * touched * n_kv_heads * 2 // WARPS)
    sizes = n_requests, new, n_kv_heads, touched, *cache.table.shape, len(cache.k_pages), cache.page_size // UNIT
    args = k, v, cache.k_pages, cache.v_pages, cache.scales, slots, cache.lens, cache.table, *sizes
    kernel = _kernel(k.dtype, head_dim, cache.bits)
    return kernel.unchecked(blocks, 32 * WARPS, *args, pdl=pdl, **options)


@functools.cache
def _kernel(dtype, head_dim, bits):
    defines = {"DTYPE": DTYPES[dtype], "HEAD_DIM": head_dim, "BITS": 4 if bits == 4 else 8}
    defines |= {"GROUP": default_group(bits, "token", head_dim), "FP8": int(bits == "fp8")}
    return cuda.load(HERE / "write_codes.cu", tuple(f"-D{name}={value}" for name, value in defines.items())).write_codes


def dequantized(cache, pages, tokens):
    """(k, v) of the first so many tokens of a request of these pages: code · scale, float32 (tokens, n_kv_heads,
    head_dim). pages: a list, or an int tensor on the cache's device."""
    if not tokens:
        return [torch.zeros(0, cache.n_kv_heads, cache.head_dim, device=cache.device) for _ in range(2)]
    pages = torch.as_tensor(pages, dtype=torch.int64, device=cache.device)
    scales, found = cache.scales[pages], []  # (pages, n_kv_heads, units, 2, 16 · groups)
    for of, codes in enumerate((cache.k_pages, cache.v_pages)):
        role = "keys", "values"
        units = codes[pages].transpose(0, 1).flatten(1, 2)[None]  # as a contiguous cache of one sequence
        codes = layout.unpack(units, cache.bits, role[of], 0, 0, tokens)[0]
        scale = scales[:, :, :, of].transpose(0, 1).flatten(1, 2)[None]
        scale = layout.unpack_token_scales(scale, role[of])[0, :tokens]
        x = (codes.view(torch.float8_e4m3fn) if cache.bits == "fp8" else codes).float()
        found.append(x.unflatten(2, (scale.shape[2], -1)).mul_(scale[..., None]).flatten(2))
    return found
