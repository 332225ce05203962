"""gradients: the best rung for the arguments, and which says which."""

import functools
import warnings

from kernels.ssd.arguments import NO_LIMIT
from kernels.ssd_backward.arguments import expect_backward
from kernels.ssd_backward.few import few
from kernels.ssd_backward.fused import fused
from kernels.ssd_backward.fused import takes as fused_takes
from kernels.ssd_backward.plain import plain

MOST_INTERPRETED = 512  # tokens times heads: beyond, a kernel takes minutes on the CPU


def _few_takes(*tensors, **options):
    return ""


FASTEST = (fused, fused_takes), (few, _few_takes)  # takes: why the rung cannot, or ""


def gradients(
    dy, x, dt, A, B, C, *, chunk_size=None, dfinal_states=None, D=None, z=None, dt_bias=None, initial_states=None,
    seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=NO_LIMIT,
):  # fmt: skip
    """The gradients, by the best rung for these tensors. → Gradients

    Arguments: kernels.ssd_backward. `which` says which rung runs, and why; another than the fastest says so, once for
    each reason. On the CPU the kernels run on the SIMT machine or in Triton's interpreter up to MOST_INTERPRETED tokens
    times heads; beyond, where that would take minutes, `plain` runs in their place. In 16 bits the kernels round sums
    within a chunk, and the state's gradient, to the dtype: in float16 dy wants to be scaled, as everywhere in training,
    so that neither overflows (65504) nor loses its digits (below 6e-5).
    """
    options = dict(
        chunk_size=chunk_size, dfinal_states=dfinal_states, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states,
        seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, dt_limit=dt_limit,
    )  # fmt: skip
    rung, why = _choose("gradients", dy, x, dt, A, B, C, options)
    if why:
        _say_once(f"kernels.ssd_backward.gradients: {why}. So {rung.__name__} runs, and takes longer")
    return rung(dy, x, dt, A, B, C, **options)


def which(dy, x, dt, A, B, C, **options):
    """The rung that `gradients` runs with these arguments, and why it is not the fastest: (name, why). Runs nothing."""
    rung, why = _choose("which", dy, x, dt, A, B, C, options)
    return rung.__name__, why


def _choose(where, dy, x, dt, A, B, C, options):
    looked_at = {name: value for name, value in options.items() if name != "dt_softplus"}
    problem = expect_backward(where, dy, x, dt, A, B, C, **looked_at)
    first = ""
    if x.is_cpu and problem.batch * problem.seqlen * problem.nheads > MOST_INTERPRETED:
        first = (
            f"more than {MOST_INTERPRETED} tokens times heads would take a kernel minutes on the CPU, where it is "
            f"interpreted"
        )
    for rung, takes in () if first else FASTEST:
        if not (why := takes(problem, dy, x, dt, A, B, C, **options)):
            return rung, first
        first = first or why
    return plain, first if FASTEST else ""


@functools.cache
def _say_once(what):
    warnings.warn(what, stacklevel=3)
