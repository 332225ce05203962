"""How exact is it? Measured on a GPU, and stored with the run of bench.py: the 2.7B model's layer against float64.

Two questions. How far off are the rungs and mamba_ssm over the length of the sequence, with the decays of Mamba-2's
initialisation and with slow ones? And what do 16-bit states change? There outputs are compared with those of `five`
with fp32 states: what share differs at all, and by more than 1e-3 and 1e-2 of 1 + |output|.

States between kernels: `five` keeps them in the dtype that is asked for; mamba_ssm keeps those at chunk starts in 16
bits; fused rungs keep them in fp32, in registers for the most part. All add up in fp32.
"""

import functools

import torch

from kernels.attention.bench import empty, short
from kernels.ssd import bench, peers
from kernels.ssd.five import SOURCES, five
from kernels.ssd.fused import SOURCES as FUSED
from kernels.ssd.fused import fused
from lab.table import Table

LENGTHS = (1024, 4096, 16384, 65536, 131072)
LONG = 65536
CHUNK = 256  # of mamba_ssm
LIMITS = (1e-3, 1e-2)
ALL = (*dict.fromkeys((*SOURCES, *FUSED, "kernels/ssd/accuracy.py")),)
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def tables():
    """The Tables of this study."""
    cases = [(torch.float16, False), (torch.float16, True), (torch.bfloat16, False), (torch.bfloat16, True)]
    return [_errors(*case) for case in cases] + [_shares(torch.float16), _shares(torch.bfloat16)]


def variants(dtype):
    """{what: function of the layer's arguments}."""
    found = {
        "five, fp32 states": five,
        f"five, {NAMES[dtype]} states": functools.partial(five, state_dtype=dtype),
        "fused.cu": fused,
    }
    if peers.mamba() is not None:
        found["mamba_ssm"] = functools.partial(peers.mamba(), chunk_size=CHUNK)
    return found


def _errors(dtype, slow):
    """‖y − truth‖ / ‖truth‖ over LENGTHS."""
    rows = {}
    for seqlen in LENGTHS:
        call, wanted = _problem(seqlen, dtype, slow)
        norm = wanted.norm()
        rows.setdefault("only y rounded", {})[short(seqlen)] = float((wanted.to(dtype) - wanted).norm() / norm)
        for name, function in variants(dtype).items():
            rows.setdefault(name, {})[short(seqlen)] = float((function(**call) - wanted).norm() / norm)
    return Table(f"SSD, {NAMES[dtype]}{', slow decay' if slow else ''}: error against float64", rows, ALL)


def _shares(dtype):
    """Percent of the outputs that are not those with fp32 states, with both kinds of decay."""
    rows = {}
    for slow in (False, True):
        call, wanted = _problem(LONG, dtype, slow)
        functions = variants(dtype)
        wide = functions.pop("five, fp32 states")(**call).double()
        for name, function in functions.items():
            y = function(**call).double()
            apart = (y - wide).abs_()
            row = {"differ, %": _percent(apart > 0)}
            for limit in LIMITS:
                row[f"by more than {limit:g}, %"] = _percent(apart > limit * (1 + wide.abs()))
            row["error against float64"] = float((y - wanted).norm() / wanted.norm())
            rows[f"{name}, slow decay" if slow else name] = row
    return Table(f"SSD, {NAMES[dtype]}, {short(LONG)}: outputs beside those with fp32 states", rows, ALL)


def _percent(where):
    return 100 * int(where.sum()) / where.numel()


def _problem(seqlen, dtype, slow):
    """(a call, what it must give in float64)"""
    empty()
    call = bench.inputs(seqlen, *bench.Shape(), dtype=dtype, slow=slow)
    return call, bench.truth(call)
