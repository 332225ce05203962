"""What chapter 18 tries beside its ladder (`python -m kernels.trials mamba2`): the 2.7B model's token in one launch.

Memory rests while a vector is waited for, once the slots are full, and while slots wait for the warps that finish. Two
changes are tried, which move no number and change no bit:

- those who finish read windows and constants in front of every task. They are asked for a layer ahead, into L2;
- a vector is looked at as a whole as soon as the warp's first number is there, not its last: a way to L2 and back less
  behind the last number;

and, with both, more slots on their way. The last row waits for no vector at all: its token is wrong, and its time is
what all waiting together costs.
"""

import functools

from kernels import benching
from kernels.mamba2 import bench, one_launch, shapes
from lab import Ladder, cuda, cuda_timing
from lab.check import Verdict
from lab.source import inlined

TITLE = f"trial: {bench.MODEL.name}, fp16, a token in one launch"
SOURCES = ("kernels/mamba2/step.py", *one_launch.SOURCES, "kernels/mamba2/trials.py")
# Further arguments of Sizes in token_line.cuh: whether to ask ahead, to look early; slots on their way, and in a wait
VARIANTS = {
    "as it is": (),
    "windows and constants asked for a layer ahead": ("true", "false"),
    "vectors looked at early": ("false", "true"),
    "both": ("true", "true"),
    "both, 3 slots on their way in a wait": ("true", "true", 0, 3),
    "both, 6 in a wait as elsewhere": ("true", "true", 0, 6),
    "both, 4 on their way, 2 in a wait": ("true", "true", 4, 2),
    "both, 8 on their way, 3 in a wait": ("true", "true", 8, 3),
}
UNWAITED = "as it is, waiting for no vector (wrong)"
LOOKS = {
    "return (unsigned)(both >> 32) == date;": "return true;",
    "return when[0] == date && when[1] == date;": "return true;",
}


def variant(trial):
    """A OneLaunch with these further arguments."""
    return type("Trial", (one_launch.OneLaunch,), {"trial": trial})


def without_waiting(step):
    """Let a OneLaunch take every number that it looks at, though it has not come."""
    text = inlined("kernels/mamba2/one_launch.cu")
    for old, new in LOOKS.items():
        if text.count(old) != 1:
            raise ValueError(f"trials: one_launch.cu must look at dates once by {old!r}")
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
    for name, trial in VARIANTS.items():
        step = made(trial, model, weights)
        error = bench.checked(f"{TITLE}: {name}", step, state, wanted)
        call = functools.partial(step.launch, state.copy())
        ladder.plan(name, call, verdict=Verdict(shapes=1, error=error), **facts)
    step = without_waiting(made((), model, weights))
    ladder.plan(UNWAITED, functools.partial(step.launch, state.copy()), **facts)
    benching.measure(ladder, seconds)
    ladder.calls.clear()
    return [ladder]


def made(trial, model, weights):
    """The variant for these weights, with the token that is measured."""
    step = variant(trial)(model, weights, model.dtype, benching.DEVICE)
    step.token.fill_(bench.TOKEN), step.kv_len.fill_(1)
    return step


def tables():
    """None."""
    return []
