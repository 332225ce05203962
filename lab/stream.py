"""The order of launches on the SIMT machine: what the launch ahead may still be at when one with pdl=True starts.

The machine runs one launch after the other. A card does not: with pdl=True a launch may start before the one ahead of
it has ended. So each launch here leaves behind what it wrote and what it was given, and one with pdl=True that touches
that before griddepcontrol.wait is an error (simt/memory/ahead.py). If that launch was a dependent one too, and lets the
next one start before it has waited itself, then the launch ahead of it may still run as well, and so on: three kernels
at once are nothing rare. What PyTorch does in between is not seen.
"""

import threading

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lab.tensor_map import BITS


class Stream(threading.local):
    """What the last launch of this thread left behind: [(its storage, piece)]; `beyond` as in simt/memory/ahead.py."""

    near, beyond = (), ()

    def ahead(self, pdl):
        """The simt.Ahead of the next launch; None if it starts when all before it have ended."""
        if not pdl or not (self.near or self.beyond):
            return None
        import simt

        out = simt.Ahead(beyond=living(self.beyond))
        out.pieces = living(self.near)
        return out

    def launched(self, tensors, pdl, report):
        """A launch with these tensors has run."""
        before = self.near if pdl else ()  # what may still run beside it, until it waits
        if not pdl or report.waited:
            self.beyond = ()
        else:  # it ends, and the one ahead of it may still run
            self.beyond, before = (*self.near, *self.beyond), ()
        if report.waited and report.waits_first:
            before = ()
        if report.ahead is None:  # the next one starts when it has ended
            self.near = ()
        else:  # the next one's wait is for it, and so for those that it waits for
            self.near = merged(kept(tensors, report.ahead.pieces), before)

    def clear(self):
        self.near = self.beyond = ()


def living(held):
    return [piece for storage, piece in held if not storage.expired()]


def merged(newer, older):
    """Both, without the older pieces that are the same as a newer one: weights that every launch reads, say."""
    known = {(piece.start, piece.size, piece.written) for _, piece in newer if piece.some is None}
    rest = [(s, p) for s, p in older if p.some is not None or (p.start, p.size, p.written) not in known]
    return (*newer, *rest)


def kept(tensors, pieces):
    """The pieces with the storages that they lie in, which are not kept from being freed."""
    out = []
    for piece in pieces:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() <= piece.start < storage.data_ptr() + storage.nbytes():
                out.append((StorageWeakRef(storage), piece))
                break
    return tuple(out)


STREAM = Stream()


def still_running(writes=(), reads=()):
    """Take it that a launch which writes and reads these CPU tensors is still running: the next launch, if it has
    pdl=True, must not read what that one writes, nor write what it reads or writes, before griddepcontrol.wait.

    For tests of kernels whose inputs a kernel writes on a card.
    """
    import simt

    for name, tensors in ("writes", writes), ("reads", reads):
        if not isinstance(tensors, (tuple, list)):
            raise TypeError(f"still_running: {name} must be a tuple of CPU tensors, got {type(tensors).__name__}")
        for t in tensors:
            if not isinstance(t, torch.Tensor) or t.device.type != "cpu":
                got = f"a tensor on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
                raise TypeError(f"still_running: {name} must be a tuple of CPU tensors, got {got}")
    pieces = simt.Ahead([bits(t) for t in writes], [bits(t) for t in reads]).pieces
    STREAM.near, STREAM.beyond = kept((*writes, *reads), pieces), ()


def bits(tensor):
    """A tensor's memory as a NumPy array."""
    return tensor.detach().view(BITS.get(tensor.dtype, tensor.dtype)).numpy()
