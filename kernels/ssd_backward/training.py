"""A whole training step: the 64 layers of Mamba-2 2.7B there and back, with mamba_ssm's SSD in them, or ours.

The layers are mamba_ssm's own, as kernels/ssd/stack.py makes them, in bfloat16; of one text of 8,192 tokens the loss's
gradient of the residual is given. All is the same but what stands for mamba_chunk_scan_combined: products by cuBLAS,
norms by mamba_ssm's kernels, and one convolution for both, `conv1d`, as causal_conv1d is not built here. Autograd keeps
what each operation asks for, for all layers, and nothing is computed again: that is some 40 GB beside the weights.

Timed as called: a step takes longer on the card than in Python. mamba_ssm has the faster of its chunk sizes.
"""

import contextlib
import functools
import math
import time

import torch
import triton
import triton.language as tl

from kernels import benching, running
from kernels.benching import short
from kernels.ssd import mamba_chunk_scan_combined, stack  # of kernels.ssd.dropin it would have no gradients
from kernels.ssd.fused import SOURCES as FORWARD
from kernels.ssd.launching import launch
from kernels.ssd.peers import layer
from kernels.ssd_backward import peers
from kernels.ssd_backward.fused import SOURCES as BACKWARD
from kernels.ssd_backward.work import least
from lab import cuda_timing
from lab.figure import AsCalled, Figure
from lab.ladder import Ladder
from lab.processor import cpu_name

SEQLEN, DTYPE = 8192, torch.bfloat16
TITLE = f"Mamba-2 2.7B stack, forward and backward, bf16, {short(SEQLEN)}"
THEIRS, OURS, WITHOUT = "mamba_ssm's SSD", "ours", "no SSD at all"
HERE = "kernels/ssd_backward/training.py"
SOURCES = (HERE, "kernels/ssd/dropin.py", "kernels/ssd/operators.py", *FORWARD, *BACKWARD)
FAR = 0.05  # of each gradient, ‖a − b‖ / ‖b‖ over all layers: without one part of SSD's those of weights are 0.5 to 1
TOKENS, COLUMNS = 32, 64  # of the convolution's blocks, backwards


def ladders():
    """The Ladder of a step in a list; none where mamba_ssm is not installed, or it is not wanted."""
    if not running.wants(TITLE) or running.only_called():
        return []
    cuda_timing.expect_gpu("the ladder of a training step")
    blocks = stack.layers(dtype=DTYPE)
    return [] if blocks is None else [running.done(measure(blocks))]


def measure(blocks):
    """A step of each: compared, then timed in turns. Returns the Ladder. ValueError where ours is not mamba_ssm's."""
    benching.empty()
    for block in blocks:
        block.requires_grad_(True)
    hidden = torch.randn(1, SEQLEN, stack.MODEL, device=benching.DEVICE).to(DTYPE)
    gradient = torch.randn(hidden.shape, device=benching.DEVICE)
    peers.tune_quickly(anew=True)
    chunk = min(stack.CHUNKS, key=functools.partial(_seconds_of_few, blocks, hidden, gradient))
    ssds = {THEIRS: stack._in_chunks(chunk), OURS: mamba_chunk_scan_combined, WITHOUT: stack.no_ssd}
    steps = {name: functools.partial(step, blocks, hidden, gradient, ssd) for name, ssd in ssds.items()}
    off, itself = compared(blocks, steps, functools.partial(step, blocks, hidden, gradient), chunk)
    steps[WITHOUT]()
    apart = f"{off:.1e} from mamba_ssm's, which is {itself:.1e} from itself"
    said = {THEIRS: f"chunk {chunk}, the faster", OURS: apart, WITHOUT: "not checked"}
    figures = []
    for name, (timing, called, ratio) in stack.timed(steps, in_a_graph=False).items():
        moved, flops = work(ssd=name != WITHOUT)
        figures.append(
            Figure(
                name=name, bytes=moved, flops=flops, timing=timing, called=called, bound="flops", checked=said[name],
                share=flops / cuda_timing.flops_probe()[1] / ratio, sources=SOURCES if name == OURS else (HERE,),
            )
        )  # fmt: skip
    for block in blocks:
        block.zero_grad(set_to_none=True)
    called_on = AsCalled(cpu_name(), dict.fromkeys(SOURCES))
    ladder = Ladder(TITLE, "flops", figures, device="cuda", called_on=called_on)
    print(f"{TITLE}: ours makes it {gain(ladder):.2f} times as fast", flush=True)
    return ladder


def compared(blocks, steps, run, chunk):
    """How far our gradient of the stack's input is from mamba_ssm's, ‖a − b‖ / ‖b‖, and how far mamba_ssm's is in its
    other chunks: 64 layers make much of every rounding.

    ValueError where ours, or one of its weights' gradients, is further than FAR. What SSD hands back is a part of the
    input's gradient, and all there is of those of A, D and dt_bias.
    """
    (theirs, of_theirs), (ours, of_ours) = (_of_all(blocks, steps[name]) for name in (THEIRS, OURS))
    apart = {name: _apart(of_ours[name], wanted) for name, wanted in of_theirs.items()}
    del of_theirs, of_ours
    other = run(stack._in_chunks(next(one for one in stack.CHUNKS if one != chunk)))
    off, itself = (_apart([one], [theirs]) for one in (ours, other))
    if not off <= FAR:  # NaN too
        raise ValueError(f"{TITLE}: ours is off by {off:.2g} from mamba_ssm's, which is by {itself:.2g} from itself")
    for name, found in apart.items():
        if not found <= FAR:
            raise ValueError(f"{TITLE}: the gradient of {name} is off by {found:.2g} from mamba_ssm's")
    return off, itself


def _of_all(blocks, step):
    """The input's gradient, and those of each kind of weight, {name: one of each layer, None where there is none}."""
    found, weights = step(), {}
    for block in blocks:
        for name, weight in block.named_parameters():
            weights.setdefault(name, []).append(weight.grad)
    return found, weights


def _apart(found, wanted):
    """‖a − b‖ / ‖b‖ over tensors; infinite where there is one in b and none in a."""
    off = size = 0.0
    for one, right in zip(found, wanted, strict=True):
        if right is not None:
            right = right.float()
            size += right.square().sum().item()
            off += torch.inf if one is None else (one.float() - right).square().sum().item()
    return math.sqrt(off / size) if size else math.sqrt(off)


def gain(ladder):
    """How many times faster the step is with ours than with mamba_ssm's."""
    return ladder[THEIRS].timing.median / ladder[OURS].timing.median


def work(ssd=True):
    """(bytes, flops) of a step: products and all else three times what the way there alone asks for, SSD as its own
    ladders count it."""
    moved, flops = (3 * one for one in stack.work(SEQLEN, ssd=False))
    more = least(SEQLEN) if ssd else (0, 0)
    return moved + stack.LAYERS * more[0], flops + stack.LAYERS * more[1]


def step(blocks, hidden, gradient, ssd):
    """There and back through these blocks; gradients of their weights are made anew. Returns that of hidden."""
    for block in blocks:
        block.zero_grad(set_to_none=True)
    first = hidden.detach().requires_grad_()
    with in_place(ssd):
        through, residual = first, None
        for block in blocks:
            through, residual = block(through, residual)
        (residual + through).backward(gradient)
    return first.grad


@contextlib.contextmanager
def in_place(ssd):
    """This SSD and our conv1d stand in mamba_ssm's layers."""
    with stack._in_place(ssd):
        layer().mamba2.causal_conv1d_fn = conv1d
        yield


def _seconds_of_few(blocks, hidden, gradient, chunk):
    """Seconds of a few layers with mamba_ssm's SSD, the least of three times."""
    call = functools.partial(step, blocks[: stack.FEW], hidden, gradient, stack._in_chunks(chunk))
    begin = time.perf_counter()
    call()
    print(f"{TITLE}: mamba_ssm in chunks of {chunk} tuned in {time.perf_counter() - begin:.0f} s", flush=True)
    return min(stack.seconds(call) for _ in range(3))


# The convolution


def conv1d(x, weight, bias=None, seq_idx=None, activation="silu"):
    """kernels.ssd.stack.conv1d with gradients of x, weight and bias, which must be there."""
    if seq_idx is not None or activation not in ("silu", "swish"):
        raise NotImplementedError(f"conv1d: silu without seq_idx, got activation {activation!r}, seq_idx {seq_idx!r}")
    return _Convolution.apply(x, weight, bias)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return stack.conv1d(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        batch, channels, seqlen = x.shape
        dy = dy.transpose(1, 2).contiguous()  # (batch, seqlen, channels)
        dx = torch.empty_like(dy)
        grid = triton.cdiv(seqlen, TOKENS), triton.cdiv(channels, COLUMNS), batch
        parts = torch.empty(batch, grid[0], 5, channels, dtype=torch.float32, device=x.device)
        launch(
            convolve_backward, grid, (x, weight, bias, dy, dx, parts), (seqlen, x.stride(0)),
            (x.stride(2), channels, TOKENS, COLUMNS), num_warps=8,
        )  # fmt: skip
        sums = parts.sum((0, 1))
        return dx.transpose(1, 2), sums[:4].T.to(weight.dtype), sums[4].to(bias.dtype)


@triton.jit
def _at(base, t, stride: tl.constexpr, seqlen, there):
    return tl.load(base + t * stride, there & (t >= 0) & (t < seqlen), other=0).to(tl.float32)


@triton.jit
def _before_silu(dy, x0, x1, x2, x3, w0, w1, w2, w3, start):
    """The gradient of what silu takes: of the sum of four taps."""
    total = start + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
    opened = 1 / (1 + tl.exp(-total))
    return dy * opened * (1 + total * (1 - opened))


@triton.jit
def convolve_backward(
    x, weight, bias, dy, dx, parts, seqlen, x_b, x_l: tl.constexpr, channels: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """grid (blocks of TOKENS, blocks of COLUMNS channels, batch). An input is in four outputs, from its own on.
    parts: of each block, sums over its tokens for the four taps and the bias."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b = tl.program_id(2).to(tl.int64)
    there = c < channels
    w0 = tl.load(weight + 4 * c, there, other=0).to(tl.float32)
    w1 = tl.load(weight + 4 * c + 1, there, other=0).to(tl.float32)
    w2 = tl.load(weight + 4 * c + 2, there, other=0).to(tl.float32)
    w3 = tl.load(weight + 4 * c + 3, there, other=0).to(tl.float32)
    start = tl.load(bias + c, there, other=0).to(tl.float32)
    x += b * x_b + c
    of = b * seqlen * channels + c
    a0, a1, a2 = _at(x, t - 3, x_l, seqlen, there), _at(x, t - 2, x_l, seqlen, there), _at(x, t - 1, x_l, seqlen, there)
    a3, a4 = _at(x, t, x_l, seqlen, there), _at(x, t + 1, x_l, seqlen, there)
    a5, a6 = _at(x, t + 2, x_l, seqlen, there), _at(x, t + 3, x_l, seqlen, there)
    g = _before_silu(_at(dy + of, t, channels, seqlen, there), a0, a1, a2, a3, w0, w1, w2, w3, start)
    g1 = _before_silu(_at(dy + of, t + 1, channels, seqlen, there), a1, a2, a3, a4, w0, w1, w2, w3, start)
    g2 = _before_silu(_at(dy + of, t + 2, channels, seqlen, there), a2, a3, a4, a5, w0, w1, w2, w3, start)
    g3 = _before_silu(_at(dy + of, t + 3, channels, seqlen, there), a3, a4, a5, a6, w0, w1, w2, w3, start)
    found = w3 * g + w2 * g1 + w1 * g2 + w0 * g3
    tl.store(dx + of + t * channels, found.to(dx.dtype.element_ty), there & (t < seqlen))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    parts += (b * tl.num_programs(0) + tl.program_id(0)) * 5 * channels + column
    tl.store(parts, tl.sum(g * a0, 0), column < channels)
    tl.store(parts + channels, tl.sum(g * a1, 0), column < channels)
    tl.store(parts + 2 * channels, tl.sum(g * a2, 0), column < channels)
    tl.store(parts + 3 * channels, tl.sum(g * a3, 0), column < channels)
    tl.store(parts + 4 * channels, tl.sum(g, 0), column < channels)
