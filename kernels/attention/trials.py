"""What chapter 07 tries beside its ladder (`python -m kernels.trials attention`).

Rung 3 of the mix with room for twice as many registers, rung 2 with other numbers of blocks, and how many different
results 300 runs of each give. Checked and timed as kernels.attention.bench does it, on the same shapes.
"""

import functools

import torch

from kernels import benching
from kernels.attention import bench, mix
from lab import Rung, cuda, cuda_timing
from lab.table import Table
from lab.tensors import DTYPES

CELLS = [("fp32", 4096), ("fp32", 32768), ("fp16", 32768)]  # dtype, kv_len
BLOCKS = (4, 8, 32)  # for a multiprocessor; the rung itself takes mix.BLOCKS_PER_SM
BLOCKS_AT = "fp32", 32768
RUNS, RUNS_AT = 300, 4096
ROOM = "__launch_bounds__(32 * SLICES)"  # two blocks on a multiprocessor fit into 32 registers a thread
HERE = "kernels/attention/trials.py"


def mix_roomy(att, v, *, out=None):
    """mix_shared, but told that one block on a multiprocessor is enough: a thread may have 64 registers, and not 32."""
    out = mix._expect_all("mix_roomy", att, v, out)
    (kv_len, n_kv_heads, head_dim), n_heads = v.shape, att.shape[0]
    grid, block = mix.plan("mix_shared", n_heads, kv_len, head_dim)
    roomy(v.dtype).mix(grid, block, att, v, out, n_heads, n_kv_heads, kv_len, head_dim)
    return out


@functools.cache
def roomy(dtype):
    """The module of mix_roomy for a dtype."""
    source = (mix.HERE / "mix_shared.cu").read_text()
    if source.count(ROOM) != 1:
        raise RuntimeError(f"mix_shared.cu must have {ROOM} once: the trial replaces it")
    return cuda.compile(source.replace(ROOM, f"{ROOM[:-1]}, 1)"), [f"-DDTYPE={DTYPES[dtype]}"], name="mix_roomy.cu")


def mix_split_by(blocks, att, v, *, out=None):
    """mix_split with so many blocks for a multiprocessor."""
    out = mix._expect_all("mix_split_by", att, v, out)
    (kv_len, n_kv_heads, head_dim), n_heads = v.shape, att.shape[0]
    tiles = -(-n_heads * head_dim // 128)
    splits = min(-(-blocks * mix._sms(v.device) // tiles), kv_len)
    sums = out.zero_() if out.dtype == torch.float32 else torch.zeros(out.shape, device=out.device)
    kernel = mix._kernel("mix_split", v.dtype)
    kernel((tiles, splits), 128, att, v, sums, n_heads, n_kv_heads, kv_len, head_dim)
    return out if sums is out else out.copy_(sums)


TITLES = {rung.name: rung.title for rung in mix.RUNGS}
ROOMY = Rung("mix_roomy", f"{TITLES['mix_shared']}, 64 registers", mix_roomy, (*mix.RUNGS[2].sources, HERE))
SPLIT_BY = [
    Rung(f"mix_split_{n}", f"tokens split over {n} blocks an SM, atomics", functools.partial(mix_split_by, n),
         (*mix.RUNGS[1].sources, HERE))
    for n in BLOCKS
]  # fmt: skip


def ladders(seconds=0.1):
    """Rungs 2 and 3 and their variants, checked and timed side by side. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of the mix")
    return [_ladder(*cell, seconds) for cell in CELLS]


def _ladder(name, kv_len, seconds):
    benching.empty()
    _, split, shared = mix.RUNGS
    rungs = [split, *(SPLIT_BY if (name, kv_len) == BLOCKS_AT else []), shared, ROOMY]
    inputs = bench.random_mixes(bench.DTYPES[name], bench.DTYPES[name], kv_len)
    rows = bench.mix_rows(rungs, inputs, *mix.work(*inputs[0]))
    return benching.ladder_of(f"trial: attention mix {name}, {kv_len} tokens", rows, seconds)


def tables():
    """How many different results so many runs on the same inputs give."""
    benching.empty()
    att, v = bench.random_mixes(torch.float32, torch.float32, RUNS_AT)[0]
    rows, sources = {}, {HERE: True}
    for rung in (*mix.RUNGS, ROOMY):
        found = {rung.function(att, v).cpu().numpy().tobytes() for _ in range(RUNS)}
        rows[rung.title] = {"different results": len(found)}
        sources |= dict.fromkeys(rung.sources)
    return [Table(f"attention mix fp32, {RUNS_AT} tokens, {RUNS} runs on the same inputs", rows, tuple(sources))]
