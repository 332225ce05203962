"""fused, the best rung: the whole layer in one launch of fused.cu, where the card and the tensors allow it."""

import functools
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.ssd import ends
from kernels.ssd.arguments import NO_LIMIT, expect_ssd
from kernels.ssd.five import five, sequence_numbers
from kernels.ssd.fused_choice import choose
from kernels.ssd.fused_plan import Plan, padded, plan, shared_bytes
from kernels.ssd.tuned import fused_tuned
from kernels.ssd.workspace import lasting_zeros
from lab import cuda, cuda_driver
from lab.card import multiprocessors
from lab.prepared import Calls, scratch, supply
from lab.tensor_map import TensorMap

HERE = Path(__file__).resolve().parent
FILES = ("fused.cu", "fused.py", "fused_plan.py", "fused_choice.py", "arguments.py", "ends.py")
SOURCES = tuple(f"kernels/ssd/{name}" for name in FILES)
TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
CALLS = Calls("ssd.fused", outs=3)  # y, final states, states of sequences
NEVER = 1e38  # bits: more than any decay but that of where a sequence begins, which is infinite
STOP = 127  # bits: a decay by more is 0 in float32, whose smallest number with all its digits is 2**-126
PROMOTION = 128  # bytes that L2 fetches for TMA: a row of a tile, as the next may be another block's


def fused(
    x, dt, A, B, C, *, chunk_size=None, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=NO_LIMIT, return_final_states=False, return_varlen_states=False,
    out=None, state_dtype=torch.float32, stop=STOP,
):  # fmt: skip
    """y (batch, L, H, P), like x; or a tuple of y and the states that are asked for. One launch of fused.cu.

    Arguments, results and errors are those of `five`, and besides:

    chunk_size  is looked at, and then left alone: fused.cu takes chunks of 64 tokens
    stop        where the sequence is cut, what lies so far back that it has decayed by more than 2**-stop until there
                is left out of the state, unless it is infinite or NaN. From 127 on only zeros are left out: such a
                decay is 0 in float32. Less is faster, and could be seen only where a state was 2**(stop - 24) times
                larger than all that came after it. 0: nothing is left out. (fused_tuned knows 0 or not 0 alone)

    fused.cu takes x, B, C, z in float16 or bfloat16 at addresses and strides of 16 bytes, headdim up to 128 and dstate
    up to 256, multiples of 8, states in float32, and a card of compute capability 9.0 (H100, H200, GH200). It works on
    64 columns of x and of B and C at a time, so that headdim 80 takes as long as 128, and dstate 16 as 64; and 136 as
    256, for which a block has 64 columns of x, and not 128. On the CPU it runs on the SIMT machine, bfloat16 too. All
    else goes to another rung, with one warning for each reason: `which` says to which, and why. float32 is five's,
    whose products keep its digits.

    With seq_idx or cu_seqlens nothing of a sequence reaches the next, neither infinity nor NaN. A chunk of 64 tokens in
    which one begins takes somewhat longer. Of cu_seqlens alone, or with return_varlen_states, seq_idx is made first, by
    two short kernels of torch. The states at the ends of sequences take a third (ends.py), for each one's last tokens.
    dstate above 128 is five's then.

    Products of matrices take factors rounded to the dtype of x (states, decays times dt, and D of one number a head,
    too), and add in float32: in float16 a state, or C_i B_j times its decay and dt, plus such a D where i = j, beyond
    65504 is infinite; states and scores in mamba_ssm too. The same from run to run, bit for bit. Infinity and NaN reach
    the tokens that they should, and no others; heads in which a state is not finite are slow. Moves x, z, y, dt once, B
    and C once for each pair of heads, from L2 while they fit there, or in long sequences about once for each bundle of
    pairs, and 4 P N bytes a few times for each head and multiprocessor.
    """
    numbers = None  # of sequences, by cu_seqlens
    if cu_seqlens is not None and (seq_idx is None or return_varlen_states) and getattr(x, "is_cuda", False):
        numbers = _numbers(cu_seqlens, x)
    if type(dt_limit) is list:  # as a tuple it can be part of a kind of calls
        dt_limit = tuple(dt_limit)
    how = chunk_size, dt_softplus, dt_limit, return_final_states, return_varlen_states, state_dtype, stop
    tensors = x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, numbers
    if (found := CALLS.run(how, out, None, None, *tensors)) is None:
        found = _checked(how, out, *tensors)
        if len(found) == 2:  # another rung
            return found[1]
    y, final, varlen = found
    if varlen is not None:
        ends.finish(varlen, final, x, dt, A, B, cu_seqlens, dt_bias, dt_softplus, dt_limit)
    asked = (y, *([final] if return_final_states else []), *([varlen] if return_varlen_states else []))
    return asked if len(asked) > 1 else y


def _numbers(cu_seqlens, x):
    """sequence_numbers, of tensors that nobody has looked at: None where that cannot be."""
    try:
        return sequence_numbers(cu_seqlens, x.shape[1])
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None  # expect_ssd says what is wrong


def _checked(how, out, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, numbers):
    """Look at everything, and launch. Returns (y, final states or None, those of sequences or None), or, where another
    rung has run, (its name, all that it returns)."""
    chunk_size, dt_softplus, dt_limit, return_final_states, return_varlen_states, state_dtype, stop = how
    options = dict(
        D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens,
        dt_limit=dt_limit, return_varlen_states=return_varlen_states, out=out, state_dtype=state_dtype,
    )  # fmt: skip
    problem = expect_ssd("fused", x, dt, A, B, C, chunk_size, **options)
    if x.is_cpu and seq_idx is not None and cu_seqlens is not None:
        _expect_the_same(seq_idx, cu_seqlens)
    expect_stop(stop)
    sequences = seq_idx is not None or cu_seqlens is not None
    rung, why = choose(problem, x, B, C, z, initial_states, out, sequences, state_dtype)
    if rung != "fused":
        _say_once(f"fused: {why}. So {rung} runs in the place of fused.cu, and takes longer")
        options |= dict(dt_softplus=dt_softplus, return_final_states=return_final_states)
        if rung == "five":
            return rung, five(x, dt, A, B, C, chunk_size=chunk_size, **options)
        return rung, fused_tuned(x, dt, A, B, C, **options, **({} if stop else {"stop": 0}))
    if numbers is None and cu_seqlens is not None and (seq_idx is None or return_varlen_states):
        numbers = sequence_numbers(cu_seqlens, x.shape[1])
    ready = _prepare(problem, x, dt, B, C, D, z, dt_bias, initial_states, sequences, dt_softplus, dt_limit, stop)
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    final = A.new_empty(ready.states) if return_final_states or return_varlen_states else None
    varlen = A.new_empty(cu_seqlens.shape[0] - 1, *ready.states[1:]) if return_varlen_states else None
    others = x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, numbers
    with CALLS.preparing(how, (out, None, None), (y, final, varlen), others):
        _launch(ready, dt, A, D, dt_bias, initial_states, y, final, seq_idx if numbers is None else numbers, varlen)
    return y, final, varlen


def expect_stop(stop):
    """Raise unless this is a number of bits."""
    if isinstance(stop, bool) or not isinstance(stop, int) or stop < 0:
        raise ValueError(f"fused: stop must be a whole number of bits, or 0 for never, got {stop!r}")


def which(x, dt, A, B, C, *, z=None, initial_states=None, seq_idx=None, cu_seqlens=None, out=None,
          state_dtype=torch.float32, **options):  # fmt: skip
    """The rung that `fused` runs with these arguments, and why it is not fused.cu: ("fused", ""), ("fused_tuned", why)
    or ("five", why). Looks at the tensors and runs nothing."""
    problem = expect_ssd(
        "which", x, dt, A, B, C, z=z, initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, out=out,
        state_dtype=state_dtype,
    )  # fmt: skip
    return choose(problem, x, B, C, z, initial_states, out, seq_idx is not None or cu_seqlens is not None, state_dtype)


def counters(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, dt_softplus=False,
             dt_limit=NO_LIMIT, stop=STOP, check_races=False, **chosen):  # fmt: skip
    """Run fused.cu on the SIMT machine, whatever the device. Returns its report (simt.report).

    Tensors are copied to the CPU first. check_races: also look for races. chosen: what `plan` takes by name.
    """
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx = (
        None if t is None else t.detach().cpu() for t in (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    )
    problem = expect_ssd(
        "counters", x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
        dt_limit=dt_limit,
    )  # fmt: skip
    sequences = seq_idx is not None
    rung, why = choose(problem, x, B, C, z, initial_states, None, sequences, torch.float32)
    if rung != "fused":
        raise ValueError(f"counters: fused leaves these tensors to {rung}: {why}")
    ready = _prepare(
        problem, x, dt, B, C, D, z, dt_bias, initial_states, sequences, dt_softplus, dt_limit, stop, **chosen
    )
    y, final = x.new_empty(x.shape), A.new_empty(ready.states)
    varlen = A.new_empty(int(seq_idx.max()) + 1, *ready.states[1:]) if sequences and x.shape[0] == 1 else None
    return _launch(ready, dt, A, D, dt_bias, initial_states, y, final, seq_idx, varlen, check_races=check_races)


def _expect_the_same(seq_idx, cu_seqlens):
    """Check that both have sequences begin at the same tokens."""
    begins = seq_idx[0].diff().nonzero()[:, 0] + 1
    others = cu_seqlens[(cu_seqlens > 0) & (cu_seqlens < seq_idx.shape[1])].unique().long()
    if not torch.equal(begins, others):
        raise ValueError(
            f"fused: seq_idx and cu_seqlens must have sequences begin at the same tokens, got {begins.tolist()} and "
            f"{others.tolist()}"
        )


@functools.cache
def _say_once(what):
    warnings.warn(what, stacklevel=3)


ONE = 1, 1, 1, 64, 64  # a tile, of a tensor as _tiles has it


class Ready(NamedTuple):
    """All of a launch but what is made for each."""

    plan: Plan
    kernel: object
    shared: int  # bytes
    maps: tuple
    sizes: tuple  # and the other numbers of the launch
    states: tuple  # the shape of final states


def _prepare(
    problem, x, dt, B, C, D, z, dt_bias, initial_states, sequences, dt_softplus, dt_limit, stop, **chosen
):  # fmt: skip
    p, kernel, shared, sizes = _prepared(
        problem, x.dtype, x.device, dt.dtype, None if D is None else (D.dtype, D.ndim),
        None if dt_bias is None else dt_bias.dtype, None if initial_states is None else initial_states.dtype,
        z is not None, sequences, bool(dt_softplus), **chosen,
    )  # fmt: skip
    low, high = map(float, dt_limit)
    if low < 0 and not dt_softplus:
        stop = 0  # what has decayed may grow again
    row = (1, 1, problem.dstate // 64, 64, 64) if problem.dstate == padded(problem.dstate) else None  # all tiles of it
    maps = _tiles(x, ONE), _tiles(B, row), _tiles(C, row), _tiles(x if z is None else z, ONE)
    sizes += -float(stop or (NEVER if sequences else "inf")), low, high, *dt.stride()
    return Ready(p, kernel, shared, maps, sizes, (problem.batch, problem.nheads, problem.headdim, problem.dstate))


def _launch(ready, dt, A, D, dt_bias, initial_states, y, final, seq_idx=None, varlen=None, **options):
    p = ready.plan
    return ready.kernel.unchecked(
        p.blocks, 512, *ready.maps, _tiles(y, ONE), _line(dt), A, dt_bias, D, initial_states, final,
        scratch(A, p.scratch, torch.float32), supply(functools.partial(_flags, y.device, p), of_stream=True),
        *ready.sizes, seq_idx, varlen, 0 if varlen is None else varlen.shape[0], shared=ready.shared, **options,
    )  # fmt: skip


def _tiles(tensor, box):
    """A (batch, seqlen, n, columns) tensor as (batch, n, columns / 64, seqlen, 64), in boxes of whole tiles; or, where
    these are none or no box is given, as (1, batch, n, seqlen, columns), in boxes of one, filled up with zeros."""
    batch, seqlen, n, columns = tensor.shape
    b, t, h, _ = tensor.stride()
    if columns % 64 or box is None:
        tiles, box = tensor.as_strided((1, batch, n, seqlen, columns), (b, b, h, t, 1)), ONE
    else:
        tiles = tensor.as_strided((batch, n, columns // 64, seqlen, 64), (b, h, 64, t, 1))
    return TensorMap(tiles, box, 128, l2_promotion=PROMOTION)


def _line(dt):
    """All of dt's memory from its first to its last element, as one contiguous axis."""
    if dt.is_cuda and dt.is_contiguous():
        return dt
    length = 1 + sum((n - 1) * stride for n, stride in zip(dt.shape, dt.stride()))
    line = dt.as_strided((length,), (1,))
    if dt.is_cpu and dt.element_size() == 2:  # the SIMT machine wants the whole words that a card reads a half of
        wide = dt.new_zeros(length + 2)
        wide[:length] = line
        line = wide
    return line


@functools.lru_cache(maxsize=1024)
def _prepared(problem, dtype, device, dt, D, dt_bias, initial, z, sequences, softplus, **chosen):
    """What all calls with such tensors share: (plan, kernel, bytes of shared memory, sizes of the launch)."""
    batch, seqlen, nheads, headdim, ngroups, dstate = problem[:6]
    p = plan(batch, seqlen, nheads, headdim, ngroups, dstate, multiprocessors(device), **chosen)
    shared = shared_bytes(dstate, z, sequences)
    kind = ("NO_D", "D_PER_HEAD", "D_PER_COLUMN")[D[1] if D else 0]
    steps = f"Steps<{TYPES[dt]}, {TYPES[dt_bias or torch.float32]}, {'true' if softplus else 'false'}>"
    skip = f"Skip<{TYPES[D[0] if D else torch.float32]}, {kind}>"
    gate = "WITH_Z" if z else "NO_Z"
    kinds = f"{steps}, {skip}, {gate}, {TYPES[initial or torch.float32]}{', MANY_SEQUENCES' if sequences else ''}"
    shape = f"Shape<{TYPES[dtype]}, {headdim}, {dstate}, {kinds}>"
    kernel = _module(shape, shared).fused
    sizes = seqlen, nheads, ngroups, p.pairs, p.chunks, p.tickets, p.rows, p.pairs_of_group, p.sort, p.side_by_side
    return p, kernel, shared, sizes


@functools.cache
def _module(shape, shared):
    """fused.cu for a Shape of shape.cuh."""
    return cuda.load(HERE / "fused.cu", (f"-DSHAPE={shape}", f"-DSHARED_BYTES={shared}"), arch="sm_90a")


# The counter of tickets and the flags behind it stay from launch to launch (see fused.cu). Launches of one stream
# follow each other and share theirs, if they take as many tickets; a launch in a graph, which may run beside others,
# has its own for good, from zeros that were made before.
_zeros, _of_stream = {}, {}
_taking = threading.Lock()  # no two graphs have the same words
KEPT = 1 << 19  # words of 8 bytes, for graphs


def _flags(device, p):
    """Zeros at first: an int64 tensor, the two counters and then the flags."""
    words = 2 + -(-p.flags // 2)
    if device.type == "cpu":
        return torch.zeros(words, dtype=torch.int64)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        with _taking:
            kept = _zeros.get(index)
            if kept is not None and kept.numel() >= words:
                _zeros[index] = kept[words:]
                return kept[:words]
        return torch.zeros(words, dtype=torch.int64, device=device)  # a node of the graph
    key = index, cuda_driver.own_stream(index), p.tickets, p.blocks, words
    found = _of_stream.get(key)
    if found is None:
        with _taking:
            found = _of_stream.get(key)  # another thread may have been here meanwhile
            if found is None:
                if index not in _zeros:
                    _zeros[index] = lasting_zeros(KEPT, device)
                found = _of_stream[key] = lasting_zeros(words, device)
    return found
