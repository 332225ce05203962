"""A whole prefill: the 64 layers of Mamba-2 2.7B with mamba_ssm's SSD in them, or ours, and all else the same.

The layers are mamba_ssm's own, a Block around a Mamba2 each, with the sizes of the 2.7B model and random weights in
float16, of which no two layers share any. Mamba2 calls mamba_chunk_scan_combined by name, and that name stands for the
SSD to be timed. Its norms are mamba_ssm's kernels. `conv1d` takes the place of causal_conv1d's kernel, so that nothing
needs to be compiled but by Triton; of the two ways through Mamba2 it is the one that can fill a cache for decoding.

    stack = layers()
    y = forward(stack, hidden, mamba_chunk_scan_combined)     # (batch, seqlen, 2560) -> the same, in float32
"""

import contextlib
import functools
import math
import time

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.attention import bench
from kernels.ssd import peers
from kernels.ssd.dropin import mamba_chunk_scan_combined
from kernels.ssd.five import least
from kernels.ssd.fused import SOURCES
from kernels.ssd.launching import launch
from lab import cuda_timing
from lab.ladder import Figure, Ladder
from lab.timing import Timing

LAYERS, MODEL, WIDTH = 64, 2560, 4  # layers, width of the residual, taps of the convolution
HEADS, HEADDIM, GROUPS, DSTATE = 80, 64, 1, 128
INNER, STATE = HEADS * HEADDIM, GROUPS * DSTATE
LENGTHS = (8192, 131072)
CHUNKS = (256, 128)  # what mamba_ssm's layers ask for, and what may be faster; ours takes its own
FEW = 4  # layers in which the faster is found
ROWS, STEPS, COLUMNS = 4, 16, 256  # of the convolution's blocks: a warp for a row
ROUNDS = 3
IN_A_GRAPH = 16384  # tokens up to which a forward is timed in a graph too; beyond, Python's time is hidden
TOLERANCE = 5e-3  # between outputs of the whole stack in float16, ‖a − b‖ / ‖b‖
OURS = ("kernels/ssd/stack.py", "kernels/ssd/dropin.py", *SOURCES)


# The layers


def layers(count=LAYERS, dtype=torch.float16, width=MODEL, **sizes):
    """So many of mamba_ssm's layers with weights as it initialises them, on the card. None without mamba_ssm.

    sizes: of Mamba2, by its names, in place of the 2.7B model's.
    """
    theirs = peers.layer()
    if theirs is None:
        return None
    sizes = dict(d_state=DSTATE, headdim=HEADDIM, ngroups=GROUPS, d_conv=WIDTH, chunk_size=CHUNKS[0]) | sizes
    kind = dict(device=bench.DEVICE, dtype=dtype)

    def mixer(width):
        return theirs.mamba2.Mamba2(width, use_mem_eff_path=False, layer_idx=0, **sizes, **kind)

    def norm(width):
        return theirs.layer_norm.RMSNorm(width, **kind)

    stack = []
    for number in range(count):
        block = theirs.block.Block(
            width, mixer, torch.nn.Identity, norm_cls=norm, fused_add_norm=True, residual_in_fp32=True
        )
        block.mixer.layer_idx = number
        block.mixer.out_proj.weight.data /= math.sqrt(count)  # so that the residual stays of one size
        stack.append(block.requires_grad_(False))
    return stack


@torch.inference_mode()
def forward(stack, hidden, ssd, **options):
    """The residual after all layers, float32, with `ssd` in the place of mamba_chunk_scan_combined."""
    residual = None
    with _in_place(ssd):
        for layer in stack:
            hidden, residual = layer(hidden, residual, **options)
    return residual + hidden


@contextlib.contextmanager
def _in_place(ssd):
    module = peers.layer().mamba2
    before = module.mamba_chunk_scan_combined, module.causal_conv1d_fn
    module.mamba_chunk_scan_combined, module.causal_conv1d_fn = ssd, conv1d
    try:
        yield
    finally:
        module.mamba_chunk_scan_combined, module.causal_conv1d_fn = before


def no_ssd(x, *_, **__):
    """In its place to see what all else takes: x for y."""
    return x


def conv1d(x, weight, bias=None, seq_idx=None, activation="silu"):
    """As causal_conv1d_fn: silu(bias + Σ weight[:, k] x[:, :, t - 3 + k]), (batch, channels, seqlen) like x.

    x (batch, channels, seqlen) with its channels side by side in memory, as the result has them; weight (channels, 4),
    bias (channels,), of any floating dtype. Sums are float32. ValueError for other strides, NotImplementedError for
    other widths, seq_idx and other activations.
    """
    if seq_idx is not None or activation not in ("silu", "swish") or weight.shape[1] != WIDTH:
        raise NotImplementedError(
            f"conv1d: silu of {WIDTH} taps without seq_idx, got activation {activation!r}, weight "
            f"{tuple(weight.shape)}, seq_idx {seq_idx!r}"
        )
    batch, channels, seqlen = x.shape
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"conv1d: x must have its channels side by side and weight be contiguous, got x {x.stride()}")
    y = x.new_empty(batch, seqlen, channels)
    grid = triton.cdiv(seqlen, ROWS * STEPS), triton.cdiv(channels, COLUMNS), batch
    launch(
        convolve, grid, (x, weight, bias, y), (seqlen, x.stride(0)), (x.stride(2), channels, ROWS, STEPS, COLUMNS),
        num_warps=ROWS,
    )  # fmt: skip
    return y.transpose(1, 2)


@triton.jit
def convolve(
    x, weight, bias, y, seqlen, x_b, x_l: tl.constexpr, channels: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grid (blocks of ROWS * STEPS tokens, blocks of COLUMNS channels, batch).

    A row of threads walks along STEPS tokens, with three tokens behind it in registers and four ahead on their way. It
    reads STEPS + 3 and writes STEPS.
    """
    t = tl.program_id(0).to(tl.int64) * (ROWS * STEPS) + tl.arange(0, ROWS)[:, None] * STEPS
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b = tl.program_id(2).to(tl.int64)
    there = c < channels
    w0 = tl.load(weight + 4 * c, there, other=0).to(tl.float32)
    w1 = tl.load(weight + 4 * c + 1, there, other=0).to(tl.float32)
    w2 = tl.load(weight + 4 * c + 2, there, other=0).to(tl.float32)
    w3 = tl.load(weight + 4 * c + 3, there, other=0).to(tl.float32)
    start = tl.zeros((ROWS, COLUMNS), tl.float32)
    if bias is not None:
        start += tl.load(bias + c, there, other=0).to(tl.float32)
    x += b * x_b + t * x_l + c
    y += (b * seqlen + t) * channels + c
    x0 = tl.load(x - 3 * x_l, there & (t >= 3) & (t < seqlen + 3), other=0).to(tl.float32)
    x1 = tl.load(x - 2 * x_l, there & (t >= 2) & (t < seqlen + 2), other=0).to(tl.float32)
    x2 = tl.load(x - x_l, there & (t >= 1) & (t < seqlen + 1), other=0).to(tl.float32)
    next0 = tl.load(x, there & (t < seqlen), other=0)
    next1 = tl.load(x + x_l, there & (t + 1 < seqlen), other=0)
    next2 = tl.load(x + 2 * x_l, there & (t + 2 < seqlen), other=0)
    next3 = tl.load(x + 3 * x_l, there & (t + 3 < seqlen), other=0)
    for i in tl.static_range(STEPS):
        x3 = next0.to(tl.float32)
        next0, next1, next2 = next1, next2, next3
        if i + 4 < STEPS:
            next3 = tl.load(x + (i + 4) * x_l, there & (t + i + 4 < seqlen), other=0)
        total = start + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        tl.store(y + i * channels, total / (1 + tl.exp(-total)), there & (t + i < seqlen))
        x0, x1, x2 = x1, x2, x3


# What it takes


def work(seqlen, batch=1, ssd=True):
    """(bytes, flops) of a forward of the whole stack in float16: what its parts, as they are, must read, write and do.

    Parts of a layer: add and norm, two products, convolution, SSD, gated norm.
    """
    tokens, conv = batch * seqlen, INNER + 2 * STATE
    projected = 2 * INNER + 2 * STATE + HEADS
    weights = MODEL * projected + INNER * MODEL
    through = (2 + 8 + 2) * MODEL + 2 * (MODEL + projected) + 4 * conv + 6 * INNER + 2 * (INNER + MODEL)
    moved, flops = 2 * weights + tokens * through, 2 * tokens * (weights + WIDTH * conv)
    if ssd:
        more = least(batch, seqlen, HEADS, HEADDIM, GROUPS, DSTATE)
        moved, flops = moved + more[0], flops + more[1]
    return LAYERS * moved, LAYERS * flops


def ladders():
    """The Ladders of both lengths; none where mamba_ssm is not installed."""
    cuda_timing.expect_gpu("the ladders of a whole prefill")
    stack = layers()
    return [] if stack is None else [_prefill(stack, seqlen) for seqlen in LENGTHS]


def gains(ladder):
    """(how many times faster the stack is with ours than with mamba_ssm's, and how many if SSD took no time at all).

    The second is Amdahl's bound: ours cannot be worth more.
    """
    theirs, ours, without = (f.timing.median for f in ladder.figures)
    return theirs / ours, theirs / without


def _prefill(stack, seqlen):
    """Three forwards: compared, then timed in turns. mamba_ssm has the faster of its CHUNKS."""
    begin = time.perf_counter()
    bench.empty()
    peers.tune_anew()
    title = f"Mamba-2 2.7B stack, prefill, {bench.short(seqlen)}"
    hidden = torch.randn(1, seqlen, MODEL, device=bench.DEVICE).to(torch.float16)
    chunk = min(CHUNKS, key=functools.partial(_seconds_of_few, stack, hidden))
    with_ssd = {
        "mamba_ssm: five kernels": (_in_chunks(chunk), ("kernels/ssd/stack.py",)),
        "ours: fused": (mamba_chunk_scan_combined, OURS),
        "no SSD at all": (no_ssd, ("kernels/ssd/stack.py",)),
    }
    calls = {name: functools.partial(forward, stack, hidden, ssd) for name, (ssd, _) in with_ssd.items()}
    theirs, ours, _ = (call() for call in calls.values())
    off = ((ours - theirs).norm() / theirs.norm()).item()
    if not off <= TOLERANCE:  # NaN too
        raise ValueError(f"{title}: ours is off by {off:.2g} from mamba_ssm's, allowed are {TOLERANCE:.2g}")
    del theirs, ours, _
    checked = f"chunk {chunk}, the faster", f"{off:.1e} from mamba_ssm's", "not checked"
    figures = []
    for (name, (timing, called, ratio)), said in zip(timed(calls, seqlen <= IN_A_GRAPH).items(), checked):
        moved, flops = work(seqlen, ssd=name != "no SSD at all")
        figures.append(
            Figure(
                name=name, bytes=moved, flops=flops, timing=timing, called=called, bound="flops", checked=said,
                share=flops / cuda_timing.flops_probe()[1] / ratio, sources=with_ssd[name][1],
            )
        )  # fmt: skip
    ladder = Ladder(title, "flops", figures, device="cuda")
    gain, most = gains(ladder)
    print(f"{title}: ours makes it {gain:.2f} times as fast; if SSD took no time it would be {most:.2f} times")
    print(f"{title}: {len(figures)} rows in {time.perf_counter() - begin:.1f} s", flush=True)
    return ladder


def _in_chunks(chunk):
    """mamba_ssm's SSD with chunks of this size, whatever its layer asks for."""
    theirs = peers.mamba()

    def ssd(x, dt, A, B, C, chunk_size, **options):
        return theirs(x, dt, A, B, C, chunk, **options)

    return ssd


def _seconds_of_few(stack, hidden, chunk):
    """Seconds of a few layers with mamba_ssm's SSD, the least of three times."""
    call = functools.partial(forward, stack[:FEW], hidden, _in_chunks(chunk))
    call()  # tunes
    return min(seconds(call) for _ in range(3))


def timed(calls, in_a_graph):
    """{name: (Timing, Timing as called, time over the probe's)}, in turns. Without a graph both are as called."""
    probe = cuda_timing.Graph([cuda_timing.flops_probe()[0]])
    graphs = {name: cuda_timing.Graph([call]) for name, call in calls.items()} if in_a_graph else {}
    taken, called, ratios = ({name: [] for name in calls} for _ in range(3))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            beside = np.median(probe.turn())
            called[name].append(seconds(call))
            turn = graphs[name].turn() if in_a_graph else called[name][-1:]
            taken[name] += turn
            ratios[name].append(np.median(turn) / beside)
    return {n: (Timing.of(taken[n]), Timing.of(called[n]), float(np.median(ratios[n]))) for n in calls}


def seconds(call):
    """Of one call, until the card is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
