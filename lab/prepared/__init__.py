"""Calls that are prepared once for each kind of call: a launch from Python at about the cost of the driver's own.

The first call of a kind goes the whole checked way. What it launched is noted, and every later call of that kind is
launched from C (calls.c): look at the tensors, find what was noted, fill in the addresses, launch. `python -m
kernels.host` shows what that costs the processor. Beside an H200, in November 2026, in µs:

    y = gemv(W, x) 5.4, the checked way 15.9; with out= 4.2    the SSD layer 6.7    decode attention, two launches, 8.5

Of these the driver takes 3.3 to 4.2 for a launch, y with its Python object 1.2, all the looks at a call's tensors 0.5.

The *kind* of a call is: its options; of each tensor whether there is one, dtype, shape, strides, device, the power of
two up to 16 that its address is a multiple of; and which outputs were given. All of it is looked at in every call, in
the tensors themselves: nothing is known by a Python object's id or by an address. A call of a kind that is not known, a
tensor of a subclass (but for torch.nn.Parameter) or without memory of its own, an output that requires gradients or
overlaps another tensor: such a call is left to the checked way, which does it or says what is wrong.

How a function takes part:

    CALLS = Calls("gemv")

    def gemv(W, x, *, out=None, pdl=False):
        if (y := CALLS.run((pdl,), out, W, x)) is not None:      # options, outputs, all other tensors
            return y
        y = expect_all(W, x, out, pdl)                            # the checked way, as ever
        with CALLS.preparing((pdl,), (out,), (y,), (W, x)):       # outputs as given, outputs, the other tensors
            _launch(W, x, y, pdl)                                 # one kernel or several (lab.cuda), on one device
        return y

`run` gives the outputs (one: itself; several: a tuple), or None where it did nothing. New outputs are made as they were
made the first time, dense or not. An argument that may be None (kv_lens) stands in its place as None.

What `preparing` must see, and what may not be:

- Options are numbers, strings, dtypes and tuples of such. They decide, together with the kinds of the tensors, every
  number that the launches get. True is not 1. What is no argument but decides, a setting say, is an option too.
- Only launches of lab.cuda kernels are noted, on the current stream. Nothing else may happen in the block that a later
  call needs: no zero_(), no copy, no Triton. Leave the block out where such is needed: that kind is not prepared.
- A launch's tensors and tensor maps are tensors of the call, views of them, `scratch`, or `supply`. A view is found by
  its address: it begins where its tensor begins, or lies in no other tensor of the call. Where that leaves two, as when
  one tensor is given twice, a call is not prepared.
- What is written is an output, given first, also when it is always given, such as a cache that is written in place.
  Several outputs: Calls("ssd", outs=2); one that is not wanted is None in both tuples, and stays None.
- Memory that launches share: `partial = scratch(like, count, dtype)` instead of torch.empty. A stream keeps what its
  prepared calls need of it, up to 16 MiB, and they use it one after another.
- Counters that depend on the stream: `counters = supply(function)`; where the function gives one stream always the
  same, supply(function, of_stream=True). Which stream that is, cuda_driver.own_stream says.
- A whole number that changes from call to call, such as a length: Calls("decode", numbers=1), run(.., kv_len), and in
  the block `(kv_len,) = changing(kv_len)`, which is handed to the launches. What else it decides is an option.
- A tensor map of an input: TensorMap(x, box) in the block. It needs its tensor while the block runs.

On the CPU, `run` gives None, and `preparing` does nothing. At most 1024 kinds are kept; then they are forgotten. Safe
from threads, under CUDA graphs (whose scratch comes from their pool), with streams and several cards. No Python header
is needed, but a C compiler: without, a warning says once why calls are not prepared.
"""

import functools
import threading
import warnings

import numpy as np
import torch

from lab.prepared import native
from lab.prepared.recording import NOW, Recording, changing, scratch, supply

__all__ = ["Calls", "changing", "scratch", "supply"]


_LOCK = threading.Lock()
# Of these classes themselves: one derived from them may compare as it likes.
_STAYING = frozenset({str, int, bool, float, type(None), torch.dtype, torch.device, *np.sctypeDict.values()})


def _nothing(*args):
    return None


class Calls:
    """The prepared calls of one function. name: for warnings; outs: how many outputs stand first in its calls; numbers:
    how many whole numbers stand last in them, that may differ within a kind (see recording.changing).

    run(options, *outputs, *others, *numbers)    the outputs, or None where nothing was done
    run_tracked(...)    the same; None, too, where grad mode is on and a tensor asks for a gradient
    """

    def __init__(self, name, outs=1, numbers=0):
        self.name, self.outs, self.numbers = name, outs, numbers
        self.clear()

    def clear(self):
        """Forget all kinds."""
        with _LOCK:
            self.run, self.run_tracked, self._keep = _nothing, _nothing, None
        self.kept = 0  # kinds that were prepared, in all

    def preparing(self, options, given, outputs, others):
        """A context: note what is launched in it, for later calls of this kind.

        options   a tuple
        given     the outputs as the caller gave them; outputs: as they are written; None where there is none
        others    all other tensors of the call, in the order of `run`
        """
        return _Preparing(self, options, given, (*outputs, *others))

    def keep(self, options, given, recording):
        """Prepare what was recorded."""
        if (library := _library()) is None:
            return
        with _LOCK:
            if not self._keep:
                self.run, self.run_tracked, self._keep = library.prepared_table(self.outs, self.numbers)
            keep = self._keep
        plan = recording.plan() if all(map(_stays, options)) else None
        if plan is not None:
            made = tuple(
                one is None and (made is None or native.maker(made)) for one, made in zip(given, recording.tensors)
            )
            supplies = tuple((function, of_stream) for function, of_stream, _ in recording.supplies)
            self.kept += keep(options, made, recording.tensors, plan, supplies) is not None
        elif recording.why:
            _warn(f"{self.name}: not prepared, so every call takes longer: {recording.why}")


def _stays(option):
    """Whether this is a value that cannot change later, as that of a tensor can."""
    return type(option) in _STAYING or (type(option) in (tuple, torch.Size) and all(map(_stays, option)))


class _Preparing:
    def __init__(self, calls, options, given, tensors):
        self.calls, self.options, self.given, self.tensors = calls, options, given, tensors

    def __enter__(self):
        self.recording = Recording(self.calls.name, self.tensors)
        _record((*NOW.all, self.recording))
        return self.recording

    def __exit__(self, kind, error, trace):
        _record(NOW.all[:-1])
        if kind is None and self.recording.launches:
            self.calls.keep(self.options, self.given, self.recording)


def _record(recordings):
    """Note launches in these. Meanwhile nothing that is prepared runs in this thread: it would not be noted."""
    NOW.all = recordings
    if _loaded:
        _loaded[0].prepared_pause(len(recordings))


_loaded = []


@functools.cache
def _library():
    """calls.c, or None, said once."""
    try:
        library = native.on_cards()
        library.prepared_pause(len(NOW.all))
        _loaded.append(library)
        return library
    except native.Unprepared as error:
        _warn(f"calls are not prepared, so each takes some 10 µs longer: {error}")
        return None


@functools.cache
def _warn(text):
    warnings.warn(text, RuntimeWarning, stacklevel=6)
