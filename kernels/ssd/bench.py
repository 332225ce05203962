"""Measure chapters 12 and 13 on a GPU: SSD prefill of the Mamba-2 2.7B model's layer, from 1K tokens to 256K.

80 heads, headdim 64, dstate 128, one group, batch 1, float16 in and out, dt_bias and softplus, D. The rungs stand
beside mamba_ssm's five kernels, at its best chunk size, in a CUDA graph and as called. A row's bytes and flops are what
the layer asks for (`five.least`), and not what its kernels move, so that percentages of the roof compare. In the
ladders of steps they are each step's own. Decays are those of Mamba-2's initialisation: A from -16 to -1, dt from 1e-3
to 1e-1; `slow`: A from -0.1 to -0.01, where nothing has decayed after thousands of tokens.

Each rung and peer is held against float64 on the card before it is timed and after; rungs also on hostile shapes
between NaNs.
"""

import contextlib
import functools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

import ref.ssd
from kernels.attention import bench
from kernels.attention.bench import Row, between_nans, ladder_of, peer_rows, short
from kernels.ssd import chunk_bmm, chunk_cumsum, chunk_scan, chunk_state, peers, rungs, state_passing
from kernels.ssd.arguments import NO_LIMIT
from kernels.ssd.five import SOURCES, five, least, work
from lab import cuda_timing
from lab.check import check

LENGTHS = [1 << power for power in range(10, 19)]
LONG = 65536  # of the steps
TUNED_AT = (1024, 16384)  # mamba_ssm is tuned anew from these lengths on
PEER_CHUNKS = (128, 256)
WARM = 1024  # tokens of a call that only compiles
TOLERANCE = {torch.float16: 2e-3}  # ‖out − ref‖ / ‖ref‖; states in float16 too
HOSTILE = [(777, 2, 16, 64, 2, 128), (1, 1, 16, 64, 1, 128), (515, 1, 16, 64, 1, 128)]  # seqlen, batch, and so on


class Shape(NamedTuple):
    """What a layer has, the 2.7B model's unless said otherwise."""

    batch: int = 1
    nheads: int = 80
    headdim: int = 64
    ngroups: int = 1
    dstate: int = 128


OTHERS = {  # shapes besides the 2.7B model's, with their lengths
    "batch 8": (Shape(batch=8), 8192),
    "128 heads, 8 groups": (Shape(nheads=128, ngroups=8), 16384),
    "dstate 64": (Shape(dstate=64), 16384),
    "headdim 128": (Shape(headdim=128), 16384),
    "a prime length": (Shape(), 10007),
}


class Entry(NamedTuple):
    """A row of ours: a rung as it is called."""

    title: str
    function: object
    sources: tuple
    lengths: tuple | None = None  # of the 2.7B model's layer, where it is timed; None: all, and other shapes as well


STEPS_ON_THE_WAY = (1024, 8192, 65536)  # lengths at which those rungs of chapter 13 are timed that are soon left behind
RUNGS = [  # a rung takes the arguments of `five`
    *(Entry(f"five, chunk {q}", functools.partial(five, chunk_size=q), SOURCES) for q in (64, 128, 256)),
    Entry("five, 16-bit states", functools.partial(five, chunk_size=256, state_dtype=torch.float16), SOURCES),
    *(
        Entry(rung.title, rung.function, rung.sources, STEPS_ON_THE_WAY if rung is not rungs.RUNGS[-1] else None)
        for rung in rungs.RUNGS
    ),
]


def ladders(seconds=0.05):
    """Check, then time, every rung and peer. Returns the Ladders."""
    cuda_timing.expect_gpu("the SSD ladders")
    compile_ahead()
    found = [_prefill(f"SSD prefill, 2.7B, {short(n)}", n, Shape(), seconds, n in TUNED_AT) for n in LENGTHS]
    found.append(_prefill(f"SSD prefill, 2.7B, {short(LONG)}, slow decay", LONG, Shape(), seconds, slow=True))
    for name, (shape, seqlen) in OTHERS.items():
        found.append(_prefill(f"SSD prefill, {name}, {short(seqlen)}", seqlen, shape, seconds))
    return found + [_steps(LONG, chunk_size, seconds) for chunk_size in (128, 256)]


def compile_ahead():
    """Compile all rungs and peers on all cores, in processes of their own: one after another would take minutes."""
    kinds = {shape[2::2]: shape for shape, _ in OTHERS.values()} | {Shape()[2::2]: Shape()}  # by headdim and dstate
    jobs = [
        ("rung", *shape, number)
        for shape in kinds.values()
        for number, entry in enumerate(RUNGS)
        if shape == Shape() or entry.lengths is None
    ]
    if peers.mamba() is not None:
        parts = range(len(peers.PARTS) + 1)
        jobs += [("peer", *shape, chunk, part) for shape in kinds.values() for chunk in PEER_CHUNKS for part in parts]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: _apart(*job), jobs))


def _apart(*job):
    """If it fails here, it is compiled later, and fails there."""
    command = [sys.executable, "-m", "kernels.ssd.bench", *map(str, job)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=90)


def _compile(what, *numbers):
    """One rung, by its number, or a part of mamba_ssm's kernels with a chunk size."""
    shape, rest = numbers[:5], numbers[5:]
    call = inputs(WARM, *shape)
    if what == "rung":
        RUNGS[rest[0]].function(**call)
    else:
        peers.compile_part(call, *rest)


def inputs(seqlen, batch=1, nheads=80, headdim=64, ngroups=1, dstate=128, *, slow=False):
    """Random arguments of a call, by name, but for the chunk size."""

    def draw(*shape):
        return torch.randn(shape, device=bench.DEVICE)

    low, high = (0.01, 0.1) if slow else (1, 16)
    steps = torch.exp(torch.empty(nheads, device=bench.DEVICE).uniform_(math.log(1e-3), math.log(1e-1)))
    return {
        "x": draw(batch, seqlen, nheads, headdim).half(),
        "dt": (0.1 * draw(batch, seqlen, nheads)).half(),
        "A": -torch.empty(nheads, device=bench.DEVICE).uniform_(low, high),
        "B": draw(batch, seqlen, ngroups, dstate).half(),
        "C": draw(batch, seqlen, ngroups, dstate).half(),
        "D": draw(nheads),
        "dt_bias": steps + torch.log(-torch.expm1(-steps)),  # softplus of it gives the steps
        "dt_softplus": True,
    }


def copies(call):
    """The call's arguments, several times over: 1 GB or more of x in all, so that each call finds its cache cold."""
    count = math.ceil(cuda_timing.COLD / call["x"].nbytes)
    again = [{k: v.clone() if k in ("x", "dt", "B", "C") else v for k, v in call.items()} for _ in range(count - 1)]
    return [call, *again]


def truth(call, chunk_size=256):
    """What the layer must give, in float64: chunk by chunk, one head at a time, for want of room."""
    x, B, C = call["x"], call["B"], call["C"]
    seqlen, nheads, ngroups = *x.shape[1:3], B.shape[2]
    rest = -seqlen % chunk_size

    def chunks(tensor):
        """(batch, L, n) in float64 as (batch, chunks, Q, n); 0 past the end."""
        return torch.nn.functional.pad(tensor.double(), (0, 0, 0, rest)).unflatten(1, (-1, chunk_size))

    dt = chunks(torch.nn.functional.softplus(call["dt"].double() + call["dt_bias"].double()))
    dt.flatten(1, 2)[:, seqlen:] = 0
    total = (dt * call["A"].double()).cumsum(2)  # (batch, chunks, Q, H)
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for group in range(ngroups):
        b, c = chunks(B[:, :, group]), chunks(C[:, :, group])
        cb = (c @ b.mT).tril()
        for h in range(group * nheads // ngroups, (group + 1) * nheads // ngroups):
            xh, s = chunks(x[:, :, h]), total[..., h]
            scaled = dt[..., h, None] * xh
            part = (cb * torch.exp((s[..., :, None] - s[..., None, :]).tril())) @ scaled
            added = (scaled * torch.exp(s[..., -1:] - s)[..., None]).mT @ b  # (batch, chunks, P, N)
            state, before = torch.zeros_like(added[:, 0]), torch.empty_like(added)
            kept = torch.exp(s[..., -1])[..., None, None]
            for chunk in range(added.shape[1]):
                before[:, chunk] = state
                state = kept[:, chunk] * state + added[:, chunk]
            part += torch.exp(s)[..., None] * (c @ before.mT) + call["D"][h].double() * xh
            y[:, :, h] = part.flatten(1, 2)[:, :seqlen]
    return y


def _prefill(title, seqlen, shape, seconds, tune=False, slow=False):
    """All rungs, and mamba_ssm's five at its best chunk size."""
    bench.empty()
    call = inputs(seqlen, *shape, slow=slow)
    moved, flops = least(shape.batch, seqlen, *shape[1:])
    facts = {"wanted": truth(call), "bytes": moved, "flops": flops, "tolerance": TOLERANCE[torch.float16]}
    every, rows = copies(call), []
    for entry in RUNGS:
        if entry.lengths is not None and (shape != Shape() or seqlen not in entry.lengths):
            continue
        outs = [torch.full_like(each["x"], torch.nan) for each in every]
        bound = [functools.partial(entry.function, **each, out=out) for each, out in zip(every, outs)]
        rows.append(Row(entry.title, bound, outs=outs, verdict=checked(entry.function), sources=entry.sources, **facts))
    if peers.mamba() is not None:
        if tune:
            peers.tune_anew()
        modes = {f"chunk {q}": functools.partial(peers.calls, every, q) for q in PEER_CHUNKS}
        rows += peer_rows([("mamba_ssm", modes)], **facts)
    return ladder_of(title, rows, seconds)


@functools.cache
def checked(function):
    """The Verdict of a rung on HOSTILE, inputs between NaNs, against the recurrence in float64."""
    names = ("x", "dt", "A", "B", "C", "D", "dt_bias")

    def arguments(rng, seqlen, *shape):
        torch.manual_seed(int(rng.integers(1 << 31)))
        call = inputs(seqlen, *shape)
        return [call[name].double().cpu().numpy() for name in names]

    def wanted(*arrays):
        return ref.ssd.ssd_recurrent(*arrays[:5], D=arrays[5], dt_bias=arrays[6], dt_softplus=True)[0]

    def on_card(*arrays):
        kinds = torch.float16, torch.float16, torch.float32, torch.float16, torch.float16, torch.float32, torch.float32
        call = {n: between_nans(torch.from_numpy(a.copy()).to(kind)) for n, a, kind in zip(names, arrays, kinds)}
        return function(**call, dt_softplus=True).double().cpu().numpy()

    return check(on_card, wanted, arguments, HOSTILE, tolerance=TOLERANCE[torch.float16])


def _steps(seqlen, chunk_size, seconds):
    """Each of the five kernels alone, with the bytes and flops that it is predicted to move and do."""
    bench.empty()
    call, shape = inputs(seqlen), Shape()
    predicted = work(shape.batch, seqlen, *shape[1:], chunk_size)
    x, B, C, D = (call[name] for name in ("x", "B", "C", "D"))
    steps, cum = chunk_cumsum.chunk_cumsum(call["dt"], call["A"], chunk_size, dt_bias=call["dt_bias"], dt_softplus=True)
    CB = chunk_bmm.chunk_bmm(B, C, chunk_size)
    added, strange = chunk_state.chunk_state(x, B, steps, cum)
    starts, _ = state_passing.state_passing(added, cum, seqlen)
    out = torch.empty_like(x)
    every = {
        "chunk_cumsum": lambda: chunk_cumsum.run(
            call["dt"], call["A"], chunk_size, call["dt_bias"], None, True, NO_LIMIT
        ),
        "chunk_bmm": lambda: chunk_bmm.run(B, C, chunk_size),
        "chunk_state": lambda: chunk_state.run(x, B, steps, cum, None, torch.float32),
        "state_passing": lambda: state_passing.run(added, cum, seqlen, None, None, starts),
        "chunk_scan": lambda: chunk_scan.run(x, C, CB, steps, cum, starts, strange, D, None, None, out),
    }  # fmt: skip
    rows = [
        Row(name, [run], bytes=predicted[name][0], flops=predicted[name][1], sources=SOURCES)
        for name, run in every.items()
    ]
    return ladder_of(f"SSD steps, 2.7B, {short(seqlen)}, chunk {chunk_size}", rows, seconds)


if __name__ == "__main__":
    _compile(sys.argv[1], *map(int, sys.argv[2:]))
