"""What chapter 18 tries beside its ladder (`python -m kernels.trials mamba2`): the 2.7B model's token in one launch.

What holds up the stream of weights? A multiprocessor has 0.6 µs for a task of 20 KB, and one warp takes it, reckons
what it reads, waits for room and copies; a few warps finish. Changes of either are tried, which move no number and
change no bit:

- a ticket stands for two or four neighbouring tasks, reckoned by as many lanes at once; or there are none, and each
  block takes every 132nd task;
- who finishes writes windows back behind the sums, so that it gives its slot back before they have come; states, once
  written, are the first to leave L2, so that windows and constants stay there from token to token; nine warps finish;
- more slots are on their way.

The last rows leave something out. Their tokens are wrong, and their times are what is left without it.
"""

import functools

from kernels import benching
from kernels.mamba2 import bench, one_launch, shapes
from lab import Ladder, cuda, cuda_timing
from lab.check import Verdict
from lab.source import inlined

TITLE = f"trial: {bench.MODEL.name}, fp16, a token in one launch"
SOURCES = ("kernels/mamba2/step.py", *one_launch.SOURCES, "kernels/mamba2/trials.py")
# What is written otherwise in one_launch.cu and what it includes, and what stands there
DEALT = {
    "    __device__ __forceinline__ unsigned take() const { return take_ticket(ticket, lane); }": """
    unsigned dealt = blockIdx.x;
    __device__ __forceinline__ unsigned take() { return (dealt += gridDim.x) - gridDim.x; }"""
}
UNWAITED = {
    "return (unsigned)(both >> 32) == date;": "return true;",
    "return when[0] == date && when[1] == date;": "return true;",
}
UNREAD = UNWAITED | {"if (channel < 0) return;": "return;"}
UNFINISHED = UNWAITED | {"switch (task.kind) {\n            case EMBED:": "switch (task.kind == END ? END : EMBED) {\n"
                         "            case EMBED:"}  # fmt: skip
UNMULTIPLIED = UNFINISHED | {"multiply(by, task);": "memory.sums.ring.wait_empty(to), done();"}

# As one_launch.CHOSEN: tasks of a ticket, warps that finish, whether windows are written late and states leave first.
# Then slots on their way, and in a wait
ALL = 2, 9, "true", "true"
VARIANTS = {
    "one task a ticket, 8 warps finish": ((1, 8, "false", "false"), {}),
    "tickets for 2 tasks": ((2, 8, "false", "false"), {}),
    "tickets for 4": ((4, 8, "false", "false"), {}),
    "for 2, windows written late": ((2, 8, "true", "false"), {}),
    "for 2, states leave first": ((2, 8, "false", "true"), {}),
    "for 2, both": ((2, 8, "true", "true"), {}),
    "for 2, both, 9 warps finish": (ALL, {}),
    "for 4, both, 9 warps": ((4, *ALL[1:]), {}),
    "for 2, both, 9 warps, 8 slots on their way, 3 in a wait": ((*ALL, 8, 3), {}),
    "no tickets, both, 9 warps": ((1, *ALL[1:]), DEALT),
}
WRONG = {
    "for 2, both, 9 warps, waiting for no vector (wrong)": (ALL, UNWAITED),
    "nor reading windows and the convolution's weights (wrong)": (ALL, UNREAD),
    "nor finishing anything (wrong)": (ALL, UNFINISHED),
    "nor multiplying: only the stream (wrong)": (ALL, UNMULTIPLIED),
}


def variant(trial):
    """A kind of OneLaunch, with other arguments than CHOSEN."""
    return type("Trial", (one_launch.OneLaunch,), {"chosen": trial})


def rewritten(step, changes):
    """A OneLaunch whose kernel is written otherwise: new text for old, each of which stands there once."""
    if not changes:
        return step
    text = inlined("kernels/mamba2/one_launch.cu")
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"trials: one_launch.cu must have once {old!r}")
        text = text.replace(old, new)
    options = [option for option in step.kernel.module.options if option.startswith("-D")]
    step.kernel = cuda.compile(text, options, arch="sm_90a").one_launch
    return step


def ladders(seconds=0.2):
    """The variants, checked and timed side by side. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of Mamba-2")
    benching.empty()
    model, device = bench.MODEL, benching.DEVICE
    weights, state = shapes.random_weights(model, device), shapes.RandomState(model, device=device)
    wanted = shapes.wanted_logits(model, weights, state, bench.TOKEN)
    facts = {"bytes": weights.bytes + state.bytes, "flops": bench.flops_of(model), "sources": SOURCES}
    ladder = Ladder(TITLE, **benching.BOUND)
    steps = {name: made(trial, changes, model, weights) for name, (trial, changes) in (VARIANTS | WRONG).items()}
    scratch = state.copy()
    benching.ahead(functools.partial(step.launch, scratch) for step in steps.values())
    for name, step in steps.items():
        right = {}
        if name in VARIANTS:
            error = bench.checked(f"{TITLE}: {name}", step, state, wanted)
            right = {"verdict": Verdict(shapes=1, error=error)}
        ladder.plan(name, functools.partial(step.launch, state.copy()), **right, **facts)
    benching.measure(ladder, seconds)
    ladder.calls.clear()
    return [ladder]


def made(trial, changes, model, weights):
    """The variant for these weights, with the token that is measured."""
    step = rewritten(variant(trial)(model, weights, model.dtype, benching.DEVICE), changes)
    step.token.fill_(bench.TOKEN), step.kv_len.fill_(1)
    return step


def tables():
    """None."""
    return []
