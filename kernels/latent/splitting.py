"""How split.cu is launched, and merge.cu behind it; and its relatives of one launch, last.cu and in_place.cu."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.attention.plan import card
from kernels.latent.arguments import WIDTH
from kernels.latent.counters import claim
from kernels.latent.merging import merge, partial_results, sizes_of
from lab import cuda
from lab.prepared import scratch, supply
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
    multiprocessors and bytes of shared memory for a block. What is given by name is taken as it is. RuntimeError where
    a block has too little."""
    if heads is None:
        heads = next((h for h in (16, 32) if n_heads <= h), 64 if room >= _shared(64, 32, 2) else 32)
    if tile is None:
        fits = [
            (t, s) for s in (stages,) * bool(stages) or (2, 1) for t in _tiles(heads) if _shared(heads, t, s) <= room
        ]
        if not fits:
            least = _shared(heads, _tiles(heads)[-1], stages or 1)
            raise RuntimeError(
                f"latent attention of {n_heads} heads needs {least} bytes of shared memory for a block, and this card "
                f"has {room}: cards of compute capability 8.0 and newer have enough, and CPU tensors run on the SIMT "
                "machine"
            )
        tile, stages = fits[0]
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
    chosen = dict(chosen or {})
    how = {"teams": chosen.pop("teams", None)}
    p, shape = _planned(q, cache, table, chosen)
    partial, sums = partial_results(q, p.shares)
    sizes = sizes_of(q, cache, table)
    args = q, cache, table, kv_lens, out, partial, sums, *sizes, scale
    first = _run("split", p, shape, args, pdl, options)
    return first, merge(shape, partial, sums, kv_lens, out, sizes[0], p.shares, **how, **options)


def launch_alone(q, cache, table, kv_lens, scale, out, pdl, *, chosen=None, **options):
    """split.cu without a merge behind it, which leaves `out` unfinished: to see what the merge takes."""
    p, shape = _planned(q, cache, table, chosen or {})
    args = q, cache, table, kv_lens, out, *partial_results(q, p.shares), *sizes_of(q, cache, table), scale
    return (_run("split", p, shape, args, pdl, options),)


def launch_last(q, cache, table, kv_lens, scale, out, pdl, *, chosen=None, **options):
    """last.cu: a launch, whose last block merges."""
    p, shape = _planned(q, cache, table, chosen or {})
    arrived = supply(functools.partial(claim, q.device, -(-q.shape[0] * p.head_tiles // 2)), of_stream=True)
    args = q, cache, table, kv_lens, out, *partial_results(q, p.shares), arrived, *sizes_of(q, cache, table), scale
    return (_run("last", p, shape, args, pdl, options),)


def launch_in_place(q, cache, table, kv_lens, scale, out, pdl, *, chosen=None, **options):
    """in_place.cu: a launch, whose blocks add up in one place."""
    p, shape = _planned(q, cache, table, chosen or {})
    if p.head_tiles * p.shares > card(q.device)[0]:
        raise ValueError(f"in_place: blocks wait for each other, so {card(q.device)[0]} may be there, got {p}")
    tiles = q.shape[0] * p.head_tiles
    sums = scratch(q, tiles * p.heads * 513, torch.float32)
    numbers = -(-tiles // 2)  # in words of 8 bytes: counters, then maxima
    words = numbers + -(-tiles * p.heads // 2)
    counters = supply(functools.partial(claim, q.device, words), of_stream=True)
    args = q, cache, table, kv_lens, out, sums, counters, counters[numbers:], *sizes_of(q, cache, table), scale
    return (_run("in_place", p, shape, args, pdl, options),)


def launch_amla(q, cache, table, kv_lens, scale, out, pdl, *, chosen=None, **options):
    """amla.cu: a launch, whose blocks rescale what lies there by additions to exponents. A trial: it is wrong where a
    sum is 0 (see there)."""
    p, shape = _planned(q, cache, table, chosen or {})
    if p.head_tiles * p.shares > card(q.device)[0]:
        raise ValueError(f"amla: blocks wait for each other, so {card(q.device)[0]} may be there, got {p}")
    tiles = q.shape[0] * p.head_tiles
    sums = scratch(q, tiles * p.heads * 514, torch.float32)
    turns = supply(functools.partial(claim, q.device, -(-tiles // 2)), of_stream=True)
    args = q, cache, table, kv_lens, out, sums, turns, *sizes_of(q, cache, table), scale
    return (_run("amla", p, shape, args, pdl, options),)


def _planned(q, cache, table, chosen):
    """(plan, the SHAPE that kernels are compiled with)"""
    batch, n_heads, _ = q.shape
    p = plan(batch, n_heads, sizes_of(q, cache, table)[0], *card(q.device), **chosen)
    return p, f"Shape<{DTYPES[q.dtype]}, {p.heads}, {p.tile}, {'false' if table is None else 'true'}>"


def _run(name, p, shape, args, pdl, options):
    kernel = _kernel(name, shape, p.stages)
    return kernel.unchecked((p.head_tiles, p.shares), 32 * WARPS, *args, shared=p.shared, pdl=pdl, **options)


@functools.cache
def _kernel(name, shape, stages):
    return cuda.load(HERE / f"{name}.cu", (f"-DSHAPE={shape}", f"-DSTAGES={stages}"))[name]
