"""How hopper.cu is launched, and hopper_merge.cu behind it: on cards of compute capability 9.0 (H100, H200, GH200) and
on the SIMT machine."""

import functools
from pathlib import Path
from typing import NamedTuple

from kernels.latent.merging import DEPTH, MOST_TEAMS, partial_results, sizes_of
from lab import cuda
from lab.card import capability, multiprocessors
from lab.tensor_map import TensorMap
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
SOURCES = tuple(f"kernels/latent/{name}" for name in ("hopper.cu", "hopper_merge.cu", "hopper.py"))
HEADS, TILE, THREADS = 64, 64, 384
MULTICAST_FROM, MERGE_BLOCKS = 24, 16  # tiles of a share; blocks of the merge for each multiprocessor
SHARED = 28 * 64 * 64 * 2 + 2048  # bytes: queries, two tiles, results on their way; the rest


def why_not(q, scale):
    """Why hopper.cu does not take such a call, in a few words; "" where it does. scale: times log2(e) or not."""
    if capability(q.device) != (9, 0):
        return "the card must have compute capability 9.0, for wgmma"
    if not scale > 0:
        return f"scale must be positive, got {scale}"
    return ""


class Plan(NamedTuple):
    """See hopper_plan.cuh."""

    least_tiles: int  # of a share
    merge_tiles: int  # as many take as long as a merge
    multicast: bool
    own_side_first: bool
    parts_before: int
    ahead: int  # tiles that L2 is asked for
    head_tiles: int
    shares: int  # of the line, at most
    teams: int  # of the merge
    merge_blocks: int  # at most
    extra: str  # of a measurement

    def option(self):
        values = *self[:2], *(str(v).lower() for v in self[2:4]), self.parts_before, self.ahead
        return f"-DPLAN=Plan<{', '.join(map(str, values))}>"


def plan(batch, n_heads, processors, *, least_tiles=2, merge_tiles=4, multicast=None, own_side_first=True,
         parts_before=6, ahead=None, shares=None, teams=None, merge_blocks=None, tiles=0, extra=""):  # fmt: skip
    """The Plan for so many heads on a card of so many multiprocessors. tiles: of a sequence, at most. What else is
    given by name is taken as it is."""
    head_tiles = -(-n_heads // HEADS)
    shares = shares or max(1, processors // head_tiles)
    segments = -(-shares // batch) + 1  # of a sequence, if all are of one length
    teams = teams or max(1, min(MOST_TEAMS, -(-segments // DEPTH)))
    if multicast is None:  # where L2 is what long shares wait for
        multicast = batch * tiles > MULTICAST_FROM * shares
    if ahead is None:  # of many heads two blocks ask for the same tiles, and memory has time
        ahead = 2 if head_tiles > 1 else 0
    merge_blocks = merge_blocks or min(batch * n_heads, MERGE_BLOCKS * processors)
    how = least_tiles, merge_tiles, multicast and head_tiles == 2, own_side_first, parts_before, ahead
    return Plan(*how, head_tiles, shares, teams, merge_blocks, extra)


def launch(q, cache, table, kv_lens, scale, out, pdl, *, chosen=None, **options):
    """hopper.cu and hopper_merge.cu on tensors that were looked at. chosen: for measurements, what `plan` takes by
    name."""
    if why := why_not(q, scale):
        raise ValueError(f"hopper: {why}")
    kv_len, batch, n_heads, n_pages, max_pages = sizes_of(q, cache, table)
    p = plan(batch, n_heads, multiprocessors(q.device), **{"tiles": -(-kv_len // TILE)} | (chosen or {}))
    kernel, merge = _kernels(DTYPES[q.dtype], table is not None, p.option(), p.teams, p.extra)
    partial, sums = partial_results(q, p.shares)
    report = kernel.unchecked(
        p.head_tiles * p.shares, THREADS, _map(q), _map(cache), cache, out, partial, sums, kv_lens, table, kv_len,
        batch, n_heads, n_pages, max_pages, p.shares, scale, shared=SHARED, pdl=bool(pdl),
        cluster=(2, 1, 1) if p.multicast else None, **options,
    )  # fmt: skip
    args = partial, sums, kv_lens, out, kv_len, batch, n_heads, p.shares
    return report, merge.unchecked(p.merge_blocks, 128 * p.teams, *args, pdl=True, **options)


def _map(rows):
    """Boxes of 64 rows and 64 columns of (..., rows, 576)."""
    return TensorMap(rows, (1, HEADS, 64), 128)


@functools.cache
def _kernels(dtype, paged, plan_option, teams, extra=""):
    """hopper.cu and hopper_merge.cu."""
    shape = f"-DSHAPE=Shape<{dtype}, {HEADS}, {TILE}, {str(paged).lower()}>"
    kernel = cuda.load(HERE / "hopper.cu", (shape, plan_option), arch="sm_90a").hopper
    return kernel, cuda.load(HERE / "hopper_merge.cu", (shape, plan_option, f"-DTEAMS={teams}")).merge
