"""Measure chapters 12, 13 and 15 on a GPU: SSD prefill of the Mamba-2 2.7B model's layer, from 1K tokens to 1M.

80 heads, headdim 64, dstate 128, one group, batch 1, float16 in and out, dt_bias and softplus, D. The rungs stand
beside mamba_ssm's five kernels and the published fused one (peers.py), tuned at each length and at their best chunk
size, in a CUDA graph and as called. A row's bytes and flops are what
the layer asks for (`five.least`), and not what its kernels move, so that percentages of the roof compare. In the
ladders of steps they are each step's own. Decays are those of Mamba-2's initialisation: A from -16 to -1, dt from 1e-3
to 1e-1; `slow`: A from -0.1 to -0.01, where nothing has decayed after thousands of tokens.

Each rung and peer is held against float64 on the card before it is timed and after; rungs also on hostile shapes
between NaNs. The studies are in studies.py. Parts of all this: `python -m kernels.bench ssd:lengths`, `ssd:shapes`,
`ssd:studies`.
"""

import functools
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

import ref.ssd
from kernels import benching, running
from kernels.benching import Row, between_nans, empty, ladder_of, peer_rows, short
from kernels.ssd import (
    by_hand,
    chunk_bmm,
    chunk_cumsum,
    chunk_scan,
    chunk_state,
    float32,
    peers,
    rungs,
    stack,
    state_passing,
)
from kernels.ssd.arguments import DTYPES, MOST_DSTATE, NO_LIMIT
from kernels.ssd.five import SOURCES, five, least, work
from kernels.ssd.fused import SOURCES as FUSED
from kernels.ssd.fused import fused
from kernels.ssd.fused_choice import TUNED_DSTATE
from lab import cuda_timing
from lab.check import Verdict, check
from lab.figure import AsCalled
from lab.processor import cpu_name

LENGTHS = [1 << power for power in range(10, 19)]
LONG = 65536  # of the steps, and of the chain
SLOW = (65536, 131072)  # lengths with slow decay
LONGEST, SAMPLE = 1 << 20, slice(0, None, 27)  # tokens, and the heads that are looked at there
PEER_CHUNKS = (64, 128, 256)
FUSED_PEER = "published fused kernel"
PUBLISHED = [("medium", 128), ("medium", 256)]  # precision and chunk size of the published fused kernel
PUBLISHED_HIGH = [("high", 128), ("high", 256)]  # of bfloat16, which its "medium" does not take, and of float32
WARM = 65536  # tokens of a call that only compiles, at most
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}  # ‖out − ref‖ / ‖ref‖; 16-bit states too
PUBLISHED_TOLERANCE = 2e-2  # of sums in 16 bits, or factors of 11; the row says how far off they are
HOSTILE = [(777, 2, 16, 64, 2, 128), (1, 1, 16, 64, 1, 128), (515, 1, 16, 64, 1, 128)]  # seqlen, batch, and so on
NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias")


class Shape(NamedTuple):
    """What a layer has, the 2.7B model's unless said otherwise."""

    batch: int = 1
    nheads: int = 80
    headdim: int = 64
    ngroups: int = 1
    dstate: int = 128


class Case(NamedTuple):
    """What a ladder is about. `other`: not the 2.7B model's layer as it is."""

    name: str
    seqlen: int
    shape: Shape = Shape()
    dtype: torch.dtype = torch.float16
    slow: bool = False
    other: bool = False
    sequences: int = 1  # of any lengths, in a row of tokens: seq_idx
    extra: tuple = ()  # what the call has besides: "z", "initial_states"

    @property
    def title(self):
        return f"SSD prefill, {self.name}, {short(self.seqlen)}{', slow decay' if self.slow else ''}"


def _other(name, seqlen, dtype=torch.float16, sequences=1, extra=(), **shape):
    return Case(name, seqlen, Shape(**shape), dtype, other=True, sequences=sequences, extra=extra)


CASES = [
    *(Case("2.7B", n) for n in LENGTHS),
    *(Case("2.7B", n, slow=True) for n in SLOW),
    *(_other("batch 8", n, batch=8) for n in (1024, 8192)),
    _other("bf16", 16384, torch.bfloat16),
    _other("128 heads, 8 groups", 16384, nheads=128, ngroups=8),
    _other("dstate 64", 16384, dstate=64),
    _other("dstate 256", 8192, dstate=256),
    _other("fp32", 4096, torch.float32),
    _other("headdim 128", 16384, headdim=128),
    _other("a prime length", 10007),
    _other("16 sequences in a row", 16384, sequences=16),
    *(_other("z", n, extra=("z",)) for n in (8192, 65536)),
    _other("headdim 80", 4096, headdim=80),
    _other("headdim 32", 8192, headdim=32),
    _other("dstate 16", 8192, dstate=16),
    _other("fp16 initial states", 4096, extra=("initial_states",)),
]


class Entry(NamedTuple):
    """A row of ours: a rung as it is called."""

    title: str
    function: object
    sources: tuple
    lengths: tuple | None = None  # of the 2.7B model's layer, where it is timed; None: all
    others: bool = True  # whether other cases time it too
    dtypes: tuple = DTYPES
    most_dstate: int = MOST_DSTATE
    seq_idx: bool = False  # whether it takes several sequences in a row

    def timed(self, case):
        """Whether this case times it."""
        if case.sequences > 1 and not self.seq_idx:
            return False
        if case.dtype not in self.dtypes or case.shape.dstate > self.most_dstate:
            return False
        return self.others if case.other else self.lengths is None or case.seqlen in self.lengths


STEPS_ON_THE_WAY = (1024, 8192, 65536)  # lengths at which those rungs of chapter 13 are timed that are soon left behind
RUNGS = [  # a rung takes the arguments of `five`
    *(
        Entry(f"five, chunk {q}", functools.partial(five, chunk_size=q), SOURCES, None, q > 64, seq_idx=True)
        for q in (64, 128, 256)
    ),
    Entry(
        "five, 16-bit states", functools.partial(five, chunk_size=256, state_dtype=torch.float16), SOURCES, None, False
    ),
    *(Entry(rung.title, rung.function, rung.sources, STEPS_ON_THE_WAY, False) for rung in rungs.RUNGS[:-1]),
    Entry(
        rungs.RUNGS[-1].title,
        rungs.RUNGS[-1].function,
        rungs.RUNGS[-1].sources,
        dtypes=DTYPES[:2],
        most_dstate=TUNED_DSTATE,
    ),  # fmt: skip
    Entry("fused.cu", fused, FUSED, dtypes=DTYPES[:2], seq_idx=True),
]
CHAIN = (2, 10, 40, 80), (64, 128)  # heads and chunk sizes of rung 1, alone
CLIMB = (8192, 65536)  # lengths at which chapter 15's rungs are timed


PARTS = ("lengths", "shapes", "studies")  # the 2.7B model's layer; other layers; all else


def ladders(seconds=0.05, parts=PARTS):
    """Check, then time, every rung and peer. Returns the Ladders. parts: some of PARTS"""
    cuda_timing.expect_gpu("the SSD ladders")
    cases = [case for case in CASES if ("shapes" if case.other else "lengths") in parts and running.wants(case.title)]
    others = {title: make for title, make in _studies(seconds).items() if "studies" in parts and running.wants(title)}
    told("compiling ahead", compile_ahead, cases, _chain_title() in others)
    found = [told(case.title, prefill, case, seconds) for case in cases]
    found += [told(title, make) for title, make in others.items()]
    if "studies" in parts and not running.narrowed():
        for ladder in told("whole prefills", stack.ladders):
            ladder.called_on = AsCalled(cpu_name(), dict.fromkeys(stack.OURS))
            found.append(ladder)
    return found


def _studies(seconds):
    """{title: function that gives the ladder} of those that are no prefill beside peers."""
    found = {Case("2.7B", LONGEST).title: longest, _chain_title(): chain}
    found |= {_steps_title(LONG, q): functools.partial(steps, LONG, q) for q in (128, 256)}
    found |= {_climb_title(seqlen): functools.partial(climb, seqlen) for seqlen in CLIMB}
    return {title: functools.partial(make, seconds) for title, make in found.items()}


def told(title, function, *arguments):
    """Call it, and say how long it took, checks and all."""
    begin = time.perf_counter()
    found = function(*arguments)
    print(f"{title}: {time.perf_counter() - begin:.1f} s in all", flush=True)
    return found


def compile_ahead(cases=None, studies=True):
    """Compile all rungs and peers on all cores, in processes of their own: one after another would take minutes. What
    is no Triton is not kept on disk, and is compiled in threads of this process."""
    cases = CASES if cases is None else cases
    jobs = [functools.partial(_apart, "chain", heads) for heads in CHAIN[0] if studies]
    if peers.published() is not None:
        jobs += [functools.partial(_try, case, number) for case in cases for number in _asked(case)]
    if peers.mamba() is not None:
        parts = range(len(peers.PARTS) + 1)
        jobs += [functools.partial(_apart, "peer", CASES.index(case), part) for case in _kinds(cases) for part in parts]
    for number, entry in enumerate(RUNGS):
        if _is_cuda(entry):
            jobs.append(functools.partial(_compile_rung, number, cases))
        else:
            jobs.append(functools.partial(_apart, "rung", number, *map(CASES.index, cases)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(job) for job in reversed(jobs)]:  # those that take longest stand last
            job.result()


def _is_cuda(entry):
    return any(source.endswith(".cu") for source in entry.sources)


def _kinds(cases):
    """One case of each kind that mamba_ssm's kernels are compiled for anew. Sizes of heads are no constants there."""
    found = {}
    for case in cases:
        kind = (
            case.dtype,
            case.shape.dstate,
            case.shape.batch == 1,
            case.seqlen % 16 == 0,
            case.sequences > 1,
            case.extra,
        )
        found.setdefault(kind, case)
    return list(found.values())


def _apart(*job, seconds=90):
    """Why it failed, None if it did not. What fails here is compiled later, and fails there."""
    command = [sys.executable, "-m", "kernels.ssd.bench", *map(str, job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no result within {seconds} seconds"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return None


_refused = set()  # (case, precision, chunk size) that the published fused kernel did not take in a process of its own


def _try(case, number):
    """A kernel that waits in a loop may wait forever, and one that reads too far takes the card from its process."""
    if said := _apart("published", CASES.index(case), number, seconds=200):
        precision, chunk_size = _ways(case)[number]
        _refused.add((case, precision, chunk_size))
        print(f"{case.title}: the published fused kernel, {precision}, chunk {chunk_size} is left out: {said}")


def _ways(case):
    """(precision, chunk size) of the published fused kernel in this case. It keeps one state more than others."""
    found = PUBLISHED if case.dtype == torch.float16 else PUBLISHED_HIGH
    sizes = case.shape.nheads, case.shape.headdim, case.shape.dstate
    return [(precision, q) for precision, q in found if peers.within_32_bits(case.seqlen + q, *sizes, q)]


def _asked(case):
    """Those of them that this run measures, by their numbers."""
    every = {f"{precision}, chunk {q}": n for n, (precision, q) in enumerate(_ways(case))}
    return list(running.modes(case.title, FUSED_PEER, every).values())


def _compile(what, *numbers):
    """A rung, by its number, for the cases with these numbers; a part of mamba_ssm's kernels for a case; the published
    fused kernel for a case, in one of its ways; rung 1 with so many heads."""
    if what == "published":
        case = CASES[numbers[0]]
        (call,) = peers.published_calls([_warm(case)], *_ways(case)[numbers[1]])
        call()
        torch.cuda.synchronize()
    elif what == "rung":
        _compile_rung(numbers[0], [CASES[n] for n in numbers[1:]])
    elif what == "peer":
        peers.compile_part(_warm(CASES[numbers[0]]), PEER_CHUNKS[-1], numbers[1])
    else:
        for chunk_size in CHAIN[1]:
            _one_chain(inputs(LONG, nheads=numbers[0]), chunk_size)()


def _compile_rung(number, cases):
    """All that the ladders ask of a rung: what Triton compiles depends on lengths, too."""
    entry = RUNGS[number]
    for case in cases:
        if entry.timed(case) and case.shape.batch * case.seqlen <= WARM:
            entry.function(**_warm(case))
    for shape in HOSTILE:
        entry.function(**inputs(*shape))


def _warm(case):
    return inputs(case.seqlen, *case.shape, dtype=case.dtype, sequences=case.sequences, extra=case.extra)


def inputs(
    seqlen, batch=1, nheads=80, headdim=64, ngroups=1, dstate=128, *, dtype=torch.float16, slow=False, sequences=1,
    extra=(),
):  # fmt: skip
    """Random arguments of a call, by name, but for the chunk size. sequences: how many, of random lengths, in a row.
    extra: "z" and "initial_states", of this dtype."""

    def draw(*shape):
        return torch.randn(shape, device=benching.DEVICE)

    low, high = (0.01, 0.1) if slow else (1, 16)
    steps = torch.exp(torch.empty(nheads, device=benching.DEVICE).uniform_(math.log(1e-3), math.log(1e-1)))
    several = {}
    if sequences > 1:
        begins = torch.randperm(seqlen - 1, device=benching.DEVICE)[: sequences - 1] + 1
        tokens = torch.arange(seqlen, device=benching.DEVICE)
        number = torch.bucketize(tokens, begins.sort().values, right=True)
        several["seq_idx"] = number.int().expand(batch, seqlen).contiguous()
    shapes = {"z": (batch, seqlen, nheads, headdim), "initial_states": (batch, nheads, headdim, dstate)}
    further = {name: draw(*shapes[name]).to(dtype) for name in extra}
    return (
        several
        | further
        | {
            "x": draw(batch, seqlen, nheads, headdim).to(dtype),
            "dt": (0.1 * draw(batch, seqlen, nheads)).to(dtype),
            "A": -torch.empty(nheads, device=benching.DEVICE).uniform_(low, high),
            "B": draw(batch, seqlen, ngroups, dstate).to(dtype),
            "C": draw(batch, seqlen, ngroups, dstate).to(dtype),
            "D": draw(nheads),
            "dt_bias": steps + torch.log(-torch.expm1(-steps)),  # softplus of it gives the steps
            "dt_softplus": True,
        }
    )


def copies(call, total=None):
    """The call's arguments, several times over, so that each call finds its cache cold. total: bytes of x in all."""
    count = math.ceil((total or cuda_timing.COLD) / call["x"].nbytes)
    again = [
        {k: v.clone() if k in ("x", "dt", "B", "C", "z") else v for k, v in call.items()} for _ in range(count - 1)
    ]
    return [call, *again]


def truth(call, chunk_size=256, heads=slice(None)):
    """What the layer must give, in float64, of these heads: chunk by chunk, one head at a time, for want of room."""
    x, B, C = call["x"], call["B"], call["C"]
    (batch, seqlen, nheads, headdim), ngroups = x.shape, B.shape[2]
    rest, chosen = -seqlen % chunk_size, range(nheads)[heads]

    def chunks(tensor):
        """(batch, L, n) in float64 as (batch, chunks, Q, n); 0 past the end."""
        return torch.nn.functional.pad(tensor.double(), (0, 0, 0, rest)).unflatten(1, (-1, chunk_size))

    dt = chunks(torch.nn.functional.softplus(call["dt"][:, :, heads].double() + call["dt_bias"][heads].double()))
    dt.flatten(1, 2)[:, seqlen:] = 0
    number = call["seq_idx"] if "seq_idx" in call else torch.zeros(batch, seqlen, dtype=torch.int32, device=x.device)
    number = torch.cat([number, number[:, -1:].expand(batch, rest)], 1).unflatten(1, (-1, chunk_size))
    found = torch.cat([number[:, :1, 0], number[:, :-1, -1]], 1)[..., None]  # the sequence that a chunk finds
    meets, lasts, old = number[..., None] == number[..., None, :], number == number[..., -1:], number == found
    total = (dt * call["A"][heads].double()).cumsum(2)  # (batch, chunks, Q, chosen)
    nchunks = dt.shape[1]
    y = torch.empty(batch, seqlen, len(chosen), headdim, dtype=torch.float64, device=x.device)
    states = torch.empty(nchunks, len(chosen), batch, headdim, B.shape[3], dtype=torch.float64, device=x.device)
    group = None
    for n, h in enumerate(chosen):  # what each chunk adds, and its own part of y
        if group != h * ngroups // nheads:
            group = h * ngroups // nheads
            b, c = chunks(B[:, :, group]), chunks(C[:, :, group])
            cb = (c @ b.mT).tril()
        xh, s = chunks(x[:, :, h]), total[..., n]
        scaled = dt[..., n, None] * xh
        decay = torch.exp((s[..., :, None] - s[..., None, :]).tril()) * meets
        own = (cb * decay) @ scaled + call["D"][h].double() * xh
        y[:, :, n] = own.flatten(1, 2)[:, :seqlen]
        states[:, n] = ((scaled * (torch.exp(s[..., -1:] - s) * lasts)[..., None]).mT @ b).transpose(0, 1)
    kept = (torch.exp(total[:, :, -1]) * old[..., -1:]).permute(1, 2, 0)[
        ..., None, None
    ]  # (chunks, chosen, batch, 1, 1)
    state = torch.zeros_like(states[0])
    if "initial_states" in call:
        state += call["initial_states"][:, heads].double().transpose(0, 1)
    for chunk in range(nchunks):  # from here on, the state before each chunk
        after = kept[chunk] * state + states[chunk]
        states[chunk], state = state, after
    for n, h in enumerate(chosen):
        c = chunks(C[:, :, h * ngroups // nheads])
        before = (torch.exp(total[..., n]) * old)[..., None] * (c @ states[:, n].transpose(0, 1).mT)
        y[:, :, n] += before.flatten(1, 2)[:, :seqlen]
    if "z" in call:
        y *= torch.nn.functional.silu(call["z"][:, :, heads].double())
    return y


def prefill(case, seconds):
    """All rungs, and the peers at their best chunk sizes, tuned for this case."""
    empty()
    seqlen, shape = case.seqlen, case.shape
    call = inputs(seqlen, *shape, dtype=case.dtype, slow=case.slow, sequences=case.sequences, extra=case.extra)
    moved, flops = least(shape.batch, seqlen, *shape[1:], size=call["x"].element_size())
    moved += sum(call[name].nbytes for name in case.extra)
    facts = {"wanted": truth(call), "bytes": moved, "flops": flops, "tolerance": TOLERANCE[case.dtype]}
    loose = facts | {"tolerance": PUBLISHED_TOLERANCE}
    every, rows = copies(call), []
    for entry in RUNGS:
        if entry.timed(case):
            if case.dtype is torch.float32 and entry.sources == SOURCES:  # five has kernels of its own for it
                entry = entry._replace(sources=(*entry.sources, *float32.SOURCES))
            rows.append(row_of(entry, every, verdict=checked(entry.function), **facts))
    if peers.mamba() is not None:
        peers.tune_anew()
        sizes = [q for q in PEER_CHUNKS if not (case.other and q == 64)]
        sizes = [q for q in sizes if peers.within_32_bits(seqlen, shape.nheads, shape.headdim, shape.dstate, q)]
        modes = {f"chunk {q}": functools.partial(peers.calls, every, q) for q in sizes}
        limit = loose | {"verdict": Loose()} if case.dtype == torch.float32 else facts
        rows += peer_rows([("mamba_ssm", modes)], ladder=case.title, **limit)
    if peers.published() is not None:
        ways = [way for way in _ways(case) if (case, *way) not in _refused]
        modes = {f"{way[0]}, chunk {way[1]}": functools.partial(peers.published_calls, every, *way) for way in ways}
        rows += peer_rows([(FUSED_PEER, modes)], ladder=case.title, **loose, verdict=Loose())
    return ladder_of(case.title, rows, seconds, sustain=() if case.other else ("five, chunk 256", "fused.cu"))


class Loose(Verdict):
    """Of a peer that is less exact: it says how far off it is."""

    def __str__(self):
        return f"off by {self.error:.1e}"


def longest(seconds):
    """The best rung on LONGEST tokens, some of its heads held against float64: offsets beyond 2^31 elements."""
    empty()
    case, entry = Case("2.7B", LONGEST), RUNGS[-1]
    call = _warm(case)
    moved, flops = least(1, LONGEST, *case.shape[1:])
    out = torch.full_like(call["x"], torch.nan)
    facts = {"wanted": truth(call, heads=SAMPLE), "bytes": moved, "flops": flops, "tolerance": TOLERANCE[case.dtype]}
    row = Row(
        entry.title,
        [lambda: entry.function(**call, out=out)[:, :, SAMPLE]],  # a view: nothing is launched for it
        outs=[out[:, :, SAMPLE]],
        verdict=checked(entry.function),
        sources=entry.sources,
        **facts,
    )
    return ladder_of(case.title, [row], seconds)


def _chain_title():
    return f"{rungs.RUNGS[0].title}, {short(LONG)}, by heads"


def chain(seconds):
    """Rung 1 over the number of heads. With few of them the card is nearly empty, and what it takes is what the chain
    of states takes. Four copies of the inputs: all of them are more than L2 holds."""
    empty()
    entry = next(entry for entry in RUNGS if entry.function is rungs.RUNGS[0].function)
    rows = []
    for heads in CHAIN[0]:
        call = inputs(LONG, nheads=heads)
        every, wanted = copies(call, 4 * call["x"].nbytes), truth(call)
        moved, flops = least(1, LONG, heads, *Shape()[2:])
        facts = {"wanted": wanted, "bytes": moved, "flops": flops, "tolerance": TOLERANCE[torch.float16]}
        for chunk_size in CHAIN[1]:
            calls = [_one_chain(each, chunk_size) for each in every]
            rows.append(Row(f"{heads} heads, chunk {chunk_size}", calls, sources=entry.sources, **facts))
    return ladder_of(_chain_title(), rows, seconds)


def _one_chain(call, chunk_size):
    return functools.partial(rungs.RUNGS[0].function, **call, chunk_size=chunk_size)


def _climb_title(seqlen):
    return f"SSD by hand, 2.7B, {short(seqlen)}"


def climb(seqlen, seconds):
    """Chapter 15's rungs beside each other, the last of which is fused.cu."""
    empty()
    call, shape = inputs(seqlen), Shape()
    moved, flops = least(shape.batch, seqlen, *shape[1:])
    facts = {"wanted": truth(call), "bytes": moved, "flops": flops, "tolerance": TOLERANCE[torch.float16]}
    every, rows = copies(call), []
    for rung in by_hand.RUNGS:
        rows.append(row_of(rung, every, verdict=checked(rung.function), **facts))
    return ladder_of(_climb_title(seqlen), rows, seconds)


def row_of(rung, every, **facts):
    """The Row of a rung, on these arguments by name, with an `out` for each."""
    outs = [torch.full_like(each["x"], torch.nan) for each in every]
    calls = [functools.partial(rung.function, **each, out=out) for each, out in zip(every, outs)]
    return Row(rung.title, calls, outs=outs, sources=rung.sources, **facts)


@functools.cache
def checked(function):
    """The Verdict of a rung on HOSTILE, inputs between NaNs, against the recurrence in float64."""

    def arguments(rng, *sizes):
        torch.manual_seed(int(rng.integers(1 << 31)))
        call = inputs(*sizes)
        return [call[name].double().cpu().numpy() for name in NAMES]

    def on_card(*arrays):
        kinds = torch.float16, torch.float16, torch.float32, torch.float16, torch.float16, torch.float32, torch.float32
        call = {n: between_nans(torch.from_numpy(a.copy()).to(kind)) for n, a, kind in zip(NAMES, arrays, kinds)}
        return function(**call, dt_softplus=True).double().cpu().numpy()

    return check(on_card, _recurrent, arguments, HOSTILE, tolerance=TOLERANCE[torch.float16], seed=_seed())


@functools.cache
def _seed():
    """Another one in each run, and one for all rungs: the recurrence is slow, and so it is walked once."""
    return int(np.random.SeedSequence().entropy % (1 << 32))


def _recurrent(*arrays):
    key = tuple(a.tobytes() for a in arrays)
    if key not in _walked:
        x, dt, A, B, C, D, dt_bias = arrays
        _walked[key] = ref.ssd.ssd_recurrent(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)[0]
    return _walked[key]


_walked = {}


def _steps_title(seqlen, chunk_size):
    return f"SSD steps, 2.7B, {short(seqlen)}, chunk {chunk_size}"


def steps(seqlen, chunk_size, seconds):
    """Each of the five kernels alone, with the bytes and flops that it is predicted to move and do."""
    empty()
    call, shape = inputs(seqlen), Shape()
    predicted = work(shape.batch, seqlen, *shape[1:], chunk_size)
    x, B, C, D = (call[name] for name in ("x", "B", "C", "D"))
    sizes, cum = chunk_cumsum.chunk_cumsum(call["dt"], call["A"], chunk_size, dt_bias=call["dt_bias"], dt_softplus=True)
    CB = chunk_bmm.chunk_bmm(B, C, chunk_size)
    added, strange = chunk_state.chunk_state(x, B, sizes, cum)
    starts, _ = state_passing.state_passing(added, cum, seqlen)
    out = torch.empty_like(x)
    small = [{name: call[name].clone() for name in ("dt", "B", "C")} for _ in range(8)]  # which L2 would hold
    options = chunk_size, call["dt_bias"], None, True, NO_LIMIT
    every = {
        "chunk_cumsum": [functools.partial(chunk_cumsum.run, one["dt"], call["A"], *options) for one in small],
        "chunk_bmm": [functools.partial(chunk_bmm.run, one["B"], one["C"], chunk_size) for one in small],
        "chunk_state": [lambda: chunk_state.run(x, B, sizes, cum, None, torch.float32)],
        "state_passing": [lambda: state_passing.run(added, cum, seqlen, None, None, starts)],
        "chunk_scan": [lambda: chunk_scan.run(x, C, CB, sizes, cum, starts, strange, D, None, None, out)],
    }
    rows = [
        Row(name, calls, bytes=predicted[name][0], flops=predicted[name][1], sources=SOURCES)
        for name, calls in every.items()
    ]
    return ladder_of(_steps_title(seqlen, chunk_size), rows, seconds)


if __name__ == "__main__":
    _compile(sys.argv[1], *map(int, sys.argv[2:]))
