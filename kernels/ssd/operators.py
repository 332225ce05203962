"""five, fused and mamba_chunk_scan_combined as operators of torch.library: ssd_five, ssd_fused, and its own name.

Each returns y, the final states and those of the sequences; what was not asked for has no elements. Where a tensor asks
for a gradient the operators run, and keep their inputs; kernels.ssd_backward makes all else again. Where none does, the
functions run, and nothing is kept.
"""

import functools

import torch

from kernels.ssd import arguments, dropin
from kernels.ssd.arguments import MOST_CHUNK, MOST_DSTATE, MOST_HEADDIM, NO_LIMIT
from kernels.ssd.dropin import _last_axis_contiguous
from kernels.ssd.five import five as run_five
from kernels.ssd.fused import CALLS, STOP, expect_stop
from kernels.ssd.fused import fused as run_fused
from lab.operators import Prepared, operator

TENSORS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
OPTIONS = (
    "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, Tensor? initial_states=None, Tensor? seq_idx=None, "
    "Tensor? cu_seqlens=None, bool dt_softplus=False, float[]? dt_limit=None, bool return_final_states=False, "
    "bool return_varlen_states=False"
)
LADDER = f"{TENSORS}int? chunk_size=None, {OPTIONS}, ScalarType? state_dtype=None"
RESULTS = "(Tensor, Tensor, Tensor)"
TRACKED = "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"
KEPT = "seq_idx", "cu_seqlens"
UNSEEN = "dt_softplus", "return_final_states", "state_dtype", "stop"  # not looked at by expect_ssd, or otherwise


def _results(x, y, final, varlen):
    return y, *(x.new_empty(0) if states is None else states for states in (final, varlen))


def _caller(function):
    def call(x, dt_limit=None, state_dtype=None, return_final_states=False, return_varlen_states=False, **how):
        how |= dict(return_final_states=return_final_states, return_varlen_states=return_varlen_states)
        if state_dtype is not None:
            how["state_dtype"] = state_dtype
        found = function(x, dt_limit=NO_LIMIT if dt_limit is None else tuple(dt_limit), **how)
        y, *states = found if isinstance(found, tuple) else (found,)
        final = states.pop(0) if return_final_states else None
        return _results(x, y, final, states[0] if return_varlen_states else None)

    return call


def _fake(where):
    def fake(x, dt, A, B, C, chunk_size=None, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
             cu_seqlens=None, dt_softplus=False, dt_limit=None, return_final_states=False, return_varlen_states=False,
             state_dtype=None, stop=None):  # fmt: skip
        if stop is not None:
            expect_stop(stop)
        tensors = x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, None
        p = arguments._look.__wrapped__(  # which has no cache: sizes may be symbols
            where, tuple(map(arguments._seen, tensors)), chunk_size, tuple(dt_limit or NO_LIMIT), return_varlen_states,
            state_dtype or torch.float32, (), (MOST_CHUNK, MOST_HEADDIM, MOST_DSTATE),
        )  # fmt: skip
        states = p.nheads, p.headdim, p.dstate
        final = A.new_empty(p.batch, *states) if return_final_states else None
        varlen = A.new_empty(cu_seqlens.shape[0] - 1, *states) if return_varlen_states else None
        return _results(x, x.new_empty(x.shape), final, varlen)

    return fake


def _backward(context, dy, dfinal_states, dvarlen_states, mamba=False):
    """Gradients of TRACKED. mamba: as mamba_chunk_scan_combined reads its arguments."""
    from kernels.ssd_backward import gradients  # which imports this package

    if dvarlen_states is not None and dvarlen_states.numel():  # of the bare operators: the functions refuse it before
        raise NotImplementedError("return_varlen_states: the states of sequences have no gradient")
    named = dict(zip((*TRACKED, *KEPT), context.saved_tensors))
    tensors = [_last_axis_contiguous(named.pop(name)) for name in ("x", "dt", "A", "B", "C")]
    named["z"] = _last_axis_contiguous(named["z"])
    named = {name: t if t is None or name == "z" else t.contiguous() for name, t in named.items()}
    if mamba:
        named["cu_seqlens"] = None
    if named["seq_idx"] is not None:
        named["seq_idx"] = named["seq_idx"].int()
    limit = context.options["dt_limit"]
    dy = torch.zeros_like(tensors[0]) if dy is None else dy.contiguous()
    if dfinal_states is not None:
        dfinal_states = dfinal_states.contiguous()
    return gradients(
        dy, *tensors, dfinal_states=dfinal_states, **named, dt_softplus=context.options["dt_softplus"],
        dt_limit=NO_LIMIT if limit is None else tuple(limit),
    )  # fmt: skip


def _expect_trackable(where, tensors, out, how):
    """Raise for what has no gradient, where a tensor asks for one, before anything runs."""
    if not torch.is_grad_enabled():
        return
    asking = (t for t in (*tensors, *how.values()) if isinstance(t, torch.Tensor) and t.requires_grad)
    if next(asking, None) is None:
        return
    if how["return_varlen_states"]:
        raise NotImplementedError(
            f"{where}: return_varlen_states must be False where a tensor asks for a gradient, got True: the states of "
            f"sequences have none, y and the final states have; or call it under torch.no_grad()"
        )
    if out is not None:
        raise NotImplementedError(
            f"{where}: out must be None where a tensor asks for a gradient, got a tensor; or call it under "
            f"torch.no_grad()"
        )


def _unpack(where, operators, *tensors, dt_limit=NO_LIMIT, state_dtype=torch.float32, out=None, **how):
    _expect_trackable(where, tensors, out, how)
    how["state_dtype"] = None if state_dtype is torch.float32 else state_dtype
    return _asked(_run(where, operators, tensors, how, dt_limit, out=out), how)


def _run(where, operators, tensors, how, dt_limit, **out):
    """The operator; what its schema does not take is named as the function names it."""
    try:
        how["dt_limit"] = None if dt_limit == NO_LIMIT else list(dt_limit)
        return operators(*tensors, **how, **out)
    except (RuntimeError, TypeError) as error:
        if isinstance(error, RuntimeError) and "Expected a value of type" not in str(error):
            raise  # not the schema's
        named = {name: value for name, value in how.items() if name not in UNSEEN}
        arguments.expect_ssd(where, *tensors, **named | {"dt_limit": dt_limit})
        raise


def _asked(results, how):
    asked = True, how["return_final_states"], how["return_varlen_states"]
    found = tuple(result for result, wanted in zip(results, asked) if wanted)
    return found if len(found) > 1 else found[0]


def _ladder(function, further="", prepared=None):
    """A rung of the ladder; `further`: arguments that it has besides."""
    where = function.__name__
    made = operator(
        f"ssd_{where}", LADDER + further, fake=_fake(where), results=RESULTS, unpack=functools.partial(_unpack, where),
        call=_caller(function), backward=_backward, tracked=TRACKED, kept=KEPT, prepared=prepared,
    )  # fmt: skip
    return made(function)


def _combined_call(x, dt, A, B, C, *, chunk_size, **options):
    return dropin.mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **options)


def _combined_fake(x, dt, A, B, C, **options):
    """The drop-in copies tensors whose strides do not fit, and so does this."""
    x, dt, B, C = map(_last_axis_contiguous, (x, dt, B, C))
    if options.get("seq_idx") is not None:
        options["seq_idx"] = options["seq_idx"].int()
    if not options.get("return_varlen_states"):
        options["cu_seqlens"] = None
    for name, option in options.items():
        if isinstance(option, torch.Tensor):
            options[name] = _last_axis_contiguous(option) if name == "z" else option.contiguous()
    return _fake("mamba_chunk_scan_combined")(x, dt, A.contiguous(), B, C, **options)


def _combined_unpack(
    operators, x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=NO_LIMIT, return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    how = dict(
        chunk_size=chunk_size, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
        cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, return_final_states=return_final_states,
        return_varlen_states=return_varlen_states,
    )  # fmt: skip
    where, tensors = "mamba_chunk_scan_combined", (x, dt, A, B, C)
    _expect_trackable(where, tensors, None, how)
    return _asked(_run(where, operators, tensors, how, dt_limit), how)


HOW = "chunk_size, dt_softplus, dt_limit, return_final_states, return_varlen_states"
TENSORS_OF = "x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx"
ASK_FUSED = f"run_tracked(({HOW}, state_dtype, stop), out, None, None, {TENSORS_OF}, cu_seqlens, None)"
ASK = f"run_tracked(({HOW}, float32, STOP), None, None, None, {TENSORS_OF}, None, None)"
STATES = "done[:2] if return_final_states else done[0]"  # those of sequences are no part of what is prepared here
five, fused = _ladder(run_five), _ladder(run_fused, f", int stop={STOP}", Prepared(CALLS, ASK_FUSED, STATES))
mamba_chunk_scan_combined = operator(
    "mamba_chunk_scan_combined", f"{TENSORS}int chunk_size, {OPTIONS}", fake=_combined_fake, results=RESULTS,
    unpack=_combined_unpack, call=_caller(_combined_call), backward=functools.partial(_backward, mamba=True),
    tracked=TRACKED, kept=KEPT,
    prepared=Prepared(CALLS, ASK, STATES, {"float32": torch.float32, "STOP": STOP}),
)(dropin.mamba_chunk_scan_combined)  # fmt: skip
