"""Measure Mamba-2 on a GPU: a token and a prompt of the 2.7B model with random weights, the state's step of a batch,
and the convolution.

A token's bytes are those of every weight, of a row of the embedding, and of the states, read and written. Its rungs are
the steps of kernels/mamba2/step.py; in a CUDA graph a rung is what a text costs a token. The states move on with every
call, as in a text.
"""

import functools

import torch
import torch.nn.functional as F

from kernels import benching, mamba2, running
from kernels.mamba2 import one_launch, peers, prompt, prompt_bench, shapes, stepping
from kernels.mamba2.step import OneOperationEach, Step, TorchOperations
from kernels.ssd import peers as ssd_peers
from lab import Ladder, cuda_timing
from lab.check import Verdict

MODEL, TOKEN = shapes.MAMBA2_2_7B, 17
BATCH = 64  # of the state's step
TOLERANCE = 2e-2  # of the logits: all layers round, one after another
STATES = {torch.float32: "", torch.float16: ", states of 16 bits"}

HERE = "kernels/mamba2/"
LAUNCHES = ("kernels/fusion/launches.py", HERE + "launches.py")
PRODUCTS = (HERE + "norm_in_proj.cu", HERE + "norm_out_proj.cu", *LAUNCHES)
FUSED = (HERE + "step.py", HERE + "embed.cu", *PRODUCTS, *stepping.SOURCES)
RINGS = (HERE + "in_proj_ring.cu", HERE + "out_proj_ring.cu", *LAUNCHES)
BULK = (HERE + "step.py", HERE + "embed.cu", *RINGS, *stepping.SOURCES)
NORMS = (HERE + "add_norm.cu", HERE + "gated_norm.cu")
APART = (
    HERE + "step.py", HERE + "embed.cu", HERE + "conv1d.cu", *NORMS, *stepping.SOURCES, "kernels/gemv/gemv.cu",
    "kernels/gemv/plan.py",
)  # fmt: skip


def ladders(seconds=0.2):
    """Check, then time, every rung and peer. Returns the Ladders."""
    cuda_timing.expect_gpu("the ladders of Mamba-2")
    found = []
    titles = {token_title(dtype): functools.partial(token, dtype, seconds) for dtype in STATES}
    titles |= {step_title(kind): functools.partial(batch_step, kind, seconds) for kind in (32, 16, 8)}
    titles |= {"Causal conv1d and silu, 8K tokens of 5376 channels": functools.partial(convolution, seconds)}
    titles |= {
        prompt_bench.title_of(seqlen): functools.partial(prompt_bench.prefill, seqlen)
        for seqlen in prompt_bench.LENGTHS
    }
    for title, make in titles.items():
        if running.wants(title):
            benching.empty()
            found.append(make())
    return found


# A token


def token_title(dtype):
    return f"{MODEL.name}, fp16, a token{STATES[dtype]}"


def token(dtype, seconds):
    """The ladder of a whole token."""
    weights = shapes.random_weights(MODEL, benching.DEVICE)
    state = shapes.RandomState(MODEL, dtype, benching.DEVICE)
    wanted = shapes.wanted_logits(MODEL, weights, state, TOKEN)
    ladder = Ladder(token_title(dtype), **benching.BOUND)
    facts = {"bytes": weights.bytes + state.bytes, "flops": flops_of(MODEL)}
    steps = dict(rungs(MODEL, weights, dtype))
    benching.ahead(part for step, _ in steps.values() for part in step.parts(state.copy(), once=True))
    for name, (step, sources) in steps.items():
        error = checked(f"{ladder.title}: {name}", step, state, wanted)
        mine = state.copy()
        ladder.plan(
            name, functools.partial(step.launch, mine), verdict=Verdict(shapes=1, error=error), sources=sources, **facts
        )  # fmt: skip
    there = torch.tensor([TOKEN], device=benching.DEVICE)
    if (call := peers.token_call(MODEL, weights, state.copy(), there)) is not None:
        off = float((call()[0].double() - wanted).norm() / wanted.norm())
        if off <= TOLERANCE:
            ladder.plan(peers.TOKEN, call, verdict=Verdict(shapes=1, error=off), **facts)
        else:
            print(f"{ladder.title}: {peers.TOKEN} is off by {off:.2g}; it is left out")
    benching.measure(ladder, seconds, sustain=[name for name in steps if name.endswith("PDL")][-1:])
    ladder.calls.clear()
    return running.done(ladder)


def rungs(shape, weights, dtype=torch.float32, device=None):
    """Yield (title, (Step, its sources)), from the slowest on."""

    def step(kind, pdl=False, **how):
        found = kind(shape, weights, shape.dtype, device or benching.DEVICE, pdl=pdl, **how)
        found.token.fill_(TOKEN)
        found.kv_len.fill_(1)
        return found

    if dtype is torch.float32:
        yield "PyTorch's operations", (step(TorchOperations), (HERE + "step.py",))
    for pdl in (False, True):
        yield f"a kernel for each operation{', PDL' * pdl}", (step(OneOperationEach, pdl), APART)
    for pdl in (False, True):
        title = f"norms, convolution and addition in the products{', PDL' * pdl}"
        yield title, (step(Step, pdl, bulk=False), FUSED)
    yield "weights by TMA, some at a time, PDL", (step(Step, True), BULK)
    if dtype is torch.float32 and one_launch.refusal(shape, device=device or benching.DEVICE) is None:
        yield "one launch", (step(one_launch.OneLaunch), (HERE + "step.py", *one_launch.SOURCES))


def checked(where, step, state, wanted):
    """The error of a step's logits by the norm; ValueError if it is wrong."""
    step.logits.fill_(torch.nan)
    step.launch(state.copy())
    benching.wait()
    error = float((step.logits.double() - wanted).norm() / wanted.norm())
    if not error <= TOLERANCE:
        raise ValueError(f"{where} is not right, so it is not timed: relative error {error:.2g}")
    return error


def flops_of(shape):
    """Of a token: two for each weight, six for each number of a state."""
    layer = shape.hidden * (shape.in_rows + shape.d_inner) + 3 * shape.d_inner * shape.dstate
    return 2 * (shape.n_layers * (layer + 4 * shape.channels) + shape.vocab * shape.hidden)


# The state's step of a batch


def step_title(kind):
    return f"State step, batch {BATCH}, 80 heads of 64, dstate 128, {kind} bits"


def batch_step(kind, seconds):
    """Ours, and mamba_ssm's Triton kernel, which has no states of 8 bits."""
    title, device = step_title(kind), benching.DEVICE
    projected = torch.randn(BATCH, MODEL.in_rows, device=device).to(MODEL.dtype)
    z, x, B, C, dt = projected.split((MODEL.d_inner, MODEL.d_inner, MODEL.dstate, MODEL.dstate, MODEL.nheads), dim=1)
    heads, groups = (BATCH, MODEL.nheads, MODEL.headdim), (BATCH, 1, MODEL.dstate)
    call = dict(
        x=x.view(heads), dt=dt, A=-1 - 15 * torch.rand(MODEL.nheads, device=device), B=B.view(groups),
        C=C.view(groups), D=torch.ones(MODEL.nheads, device=device), z=z.view(heads),
        dt_bias=torch.randn(MODEL.nheads, device=device) - 4, dt_softplus=True,
    )  # fmt: skip
    first = torch.randn(*heads, MODEL.dstate, device=device)
    make = {32: lambda: first.clone(), 16: lambda: first.half(), 8: lambda: mamba2.QuantizedState.of(first)}[kind]
    states = [make() for _ in range(-(-cuda_timing.COLD // make().nbytes) + 1)]
    small = (projected.nbytes + BATCH * MODEL.d_inner * 2) if kind else 0
    facts = {"bytes": 2 * states[0].nbytes + small, "flops": 6 * first.numel()}
    out = torch.empty(heads, device=device, dtype=MODEL.dtype)
    ladder = Ladder(title, **benching.BOUND)
    before = (states[0].dequantize() if kind == 8 else states[0]).double()
    wanted = _stepped(before, **call)
    for name, pdl in (("state_step", False), ("state_step, PDL", True)):
        error = float((mamba2.state_step(make(), **call).double() - wanted).norm() / wanted.norm())
        if not error <= 2e-3:
            raise ValueError(f"{title}: {name} is not right, so it is not timed: relative error {error:.2g}")
        calls = [functools.partial(mamba2.state_step, state, **call, out=out, pdl=pdl) for state in states]
        ladder.plan(name, calls, verdict=Verdict(shapes=1, error=error), sources=stepping.SOURCES, **facts)
    if kind != 8 and ssd_peers.layer() is not None:
        _their_step(ladder, states, call, wanted, facts)
    _copying(ladder, facts["bytes"])
    benching.measure(ladder, seconds)
    ladder.calls.clear()
    return running.done(ladder)


def _copying(ladder, moved):
    """A row for what reads and writes as much, PyTorch's ~x: the roof of kernels that write as much as they read.
    (`copy_` becomes a node of the graph that is no kernel, and takes half as long again there.)"""
    shape = 2, moved // 8
    pairs = [
        torch.zeros(shape, dtype=torch.int32, device=benching.DEVICE) for _ in range(-(-cuda_timing.COLD // moved))
    ]
    calls = [functools.partial(torch.bitwise_not, source, out=to) for to, source in pairs]
    # as `reading` in kernels/benching.py it has a source, for it is no peer
    ladder.plan("PyTorch's ~x of as many bytes", calls, bytes=moved, flops=moved // 8, sources=(HERE + "bench.py",))


def _stepped(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus):
    """y in float64."""
    dt = F.softplus(dt.double() + dt_bias.double())
    state = state * torch.exp(A.double() * dt)[..., None, None]
    state = state + (dt[..., None] * x.double())[..., None] * B.double()[:, :, None]
    y = (state * C.double()[:, :, None]).sum(-1) + D.double()[:, None] * x.double()
    return y * F.silu(z.double())


def _their_step(ladder, states, call, wanted, facts):
    """mamba_ssm's selective_state_update, as its Mamba2 calls it, with z."""
    update = getattr(ssd_peers.layer().mamba2, "selective_state_update", None)
    if update is None:
        return
    _, nheads, headdim, dstate = states[0].shape
    A, dt = call["A"][:, None, None].expand(nheads, headdim, dstate), call["dt"][..., None].expand(call["x"].shape)
    more = {name: call[name][:, None].expand(nheads, headdim) for name in ("D", "dt_bias")}
    args = call["x"], dt, A, call["B"], call["C"]
    more |= {"z": call["z"], "dt_softplus": True}
    calls = [functools.partial(update, state, *args, **more) for state in states]
    off = float((update(states[0].clone(), *args, **more).double() - wanted).norm() / wanted.norm())
    if off <= 2e-3:
        ladder.plan("mamba_ssm: selective_state_update", calls, verdict=Verdict(shapes=1, error=off), **facts)
    else:
        print(f"{ladder.title}: mamba_ssm's selective_state_update is off by {off:.2g}; it is left out")


# The convolution


def convolution(seconds):
    """conv1d of 8K tokens, where in_proj leaves them."""
    title, seqlen, channels = "Causal conv1d and silu, 8K tokens of 5376 channels", 8192, MODEL.channels
    device = benching.DEVICE
    weight, bias = torch.rand(channels, 4, device=device) - 0.5, torch.rand(channels, device=device) - 0.5
    copies = -(-cuda_timing.COLD // (2 * seqlen * MODEL.in_rows)) + 1
    u, W = (torch.randn(n, MODEL.hidden, device=device).to(MODEL.dtype) for n in (seqlen, MODEL.in_rows))
    projected = [prompt.project(u, W / MODEL.hidden**0.5)[None] for _ in range(copies)]
    inputs = [p[:, :, MODEL.d_inner : MODEL.d_inner + channels] for p in projected]
    padded = F.pad(inputs[0].double().transpose(1, 2), (3, 0))
    wanted = F.silu(F.conv1d(padded, weight.double()[:, None], bias.double(), groups=channels)).transpose(1, 2)
    ladder = Ladder(title, **benching.BOUND)
    facts = {"bytes": 4 * seqlen * channels, "flops": 8 * seqlen * channels}
    outs = [torch.empty(1, seqlen, channels, device=device, dtype=MODEL.dtype) for _ in inputs]
    final = torch.empty(1, 3, channels, device=device, dtype=MODEL.dtype)
    run = functools.partial(mamba2.conv1d, weight=weight, bias=bias, final_state=final)
    error = float((run(inputs[0], out=outs[0])[0].double() - wanted).norm() / wanted.norm())
    if not error <= 1e-3:
        raise ValueError(f"{title}: conv1d is not right, so it is not timed: relative error {error:.2g}")
    del padded, wanted
    calls = [functools.partial(run, x, out=out) for x, out in zip(inputs, outs)]
    sources = (HERE + "conv1d.cu", HERE + "convolution.py")
    ladder.plan("conv1d", calls, verdict=Verdict(shapes=1, error=error), sources=sources, **facts)
    _copying(ladder, facts["bytes"])
    benching.measure(ladder, seconds)
    ladder.calls.clear()
    return running.done(ladder)
