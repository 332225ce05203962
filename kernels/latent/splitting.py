"""How split.cu is launched, and merge.cu behind it."""

import functools
from pathlib import Path
from typing import NamedTuple

from kernels.attention.plan import card
from kernels.latent.arguments import WIDTH
from kernels.latent.merging import merge, partial_results, sizes_of
from lab import cuda
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
SOURCES = tuple(f"kernels/latent/{name}" for name in ("split.cu", "merge.cu", "splitting.py", "merging.py"))
WARPS = 8


class Plan(NamedTuple):
    """What split.cu is compiled with, and the size of its launch."""

    heads: int  # of a head tile
    tile: int  # tokens
    stages: int
    head_tiles: int
    shares: int  # of the line; as many blocks for each head tile
    shared: int  # bytes


@functools.lru_cache(maxsize=1024)
def plan(batch, n_heads, kv_len, processors, room, *, heads=None, tile=None, stages=None, shares=None):
    """The plan for a cache of kv_len tokens, or for as many as a table has room for, on a card of so many
    multiprocessors and bytes of shared memory for a block. What is given by name is taken as it is."""
    if heads is None:
        heads = next((h for h in (16, 32) if n_heads <= h), 64 if room >= _shared(64, 32, 2) else 32)
    if tile is None:
        tile = next(t for t in _tiles(heads) if _shared(heads, t, 2) <= room)
    stages = stages or 2
    head_tiles = -(-n_heads // heads)
    shares = shares or max(1, processors // head_tiles)
    return Plan(heads, tile, stages, head_tiles, min(shares, batch * -(-kv_len // tile)), _shared(heads, tile, stages))


def _tiles(heads):
    """Tokens of a tile that eight warps can share: each has eight of them at least for its 16 heads' scores, and
    sixteen make a step of the product with values."""
    least = max(16, 8 * WARPS * 16 // heads)
    return [tile for tile in (64, 32, 16) if tile >= least]


def _shared(heads, tile, stages):
    """Bytes: queries, a ring of tiles, weights, and a maximum for each warp's rows."""
    return 2 * WIDTH * (heads + stages * tile) + 2 * heads * (tile + 8) + 4 * 16 * WARPS


def launch(q, cache, table, kv_lens, scale, out, pdl, *, chosen=None, **options):
    """split.cu and merge.cu on tensors that were looked at."""
    batch, n_heads, _ = q.shape
    kv_len, *rest = sizes = sizes_of(q, cache, table)
    chosen = dict(chosen or {})
    how = {"teams": chosen.pop("teams", None)}
    p = plan(batch, n_heads, kv_len, *card(q.device), **chosen)
    shape = f"Shape<{DTYPES[q.dtype]}, {p.heads}, {p.tile}, {'false' if table is None else 'true'}>"
    partial, sums = partial_results(q, p.shares)
    args = q, cache, table, kv_lens, out, partial, sums, *sizes, scale
    kernel = _kernel(shape, p.stages)
    first = kernel.unchecked((p.head_tiles, p.shares), 32 * WARPS, *args, shared=p.shared, pdl=pdl, **options)
    return first, merge(shape, partial, sums, kv_lens, out, kv_len, p.shares, **how, **options)


@functools.cache
def _kernel(shape, stages):
    return cuda.load(HERE / "split.cu", (f"-DSHAPE={shape}", f"-DSTAGES={stages}")).split
