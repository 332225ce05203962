"""A whole token over several devices in one launch on each: one_launch.cu, its sizes, and where it finds everything.

OneLaunchShare   a device's share, a kernels.llm.one_launch.OneLaunch
OneLaunches      those of all devices of a group, launched together
"""

import functools
from types import SimpleNamespace

from kernels.collective.group import HERE
from kernels.llm import one_launch
from kernels.llm.one_launch import THREADS, OneLaunch
from lab import cuda

SOURCES = ("kernels/collective/one_launch.cu", "kernels/collective/one_launch.py", "kernels/llm/one_launch.py")


@functools.cache
def kernel(plain, devices):
    """one_launch.cu as the same sizes as a kernel of llm/one_launch.cu, for so many devices."""
    options = (*plain.module.options, f"-DDEVICES={devices}")
    sizes = [option for option in options if option.startswith("-D")]
    return cuda.load(HERE / "one_launch.cu", tuple(sizes), arch="sm_90a").one_launch_share


class OneLaunchShare(OneLaunch):
    """A device's share of a token. config, weights: those of the share, but for the embedding, which is whole."""

    def __init__(self, config, weights, dtype, device, rank, count, *, pdl=False):
        super().__init__(config, weights, dtype, device, pdl=pdl)
        self.rank, self.kernel = rank, kernel(self.kernel, count)

    def _pieces(self):
        """As for a whole model, to which as many rows of an embedding belong as of a head."""
        whole = self.weights
        self.weights = SimpleNamespace(**vars(whole) | {"embedding": whole.embedding[: self.config.vocab]})
        try:
            return super()._pieces()
        finally:
            self.weights = whole

    def knows(self, cache):
        """Whether the last launch was with this cache, as it is."""
        known = self.cache is not None and self.cache() is cache
        return known and one_launch._addresses(cache.layer(0)) == self.first

    def launch(self, cache, **options):
        raise NotImplementedError("one_launch: a share runs beside the others: OneLaunches.launch")

    def arguments(self, cache):
        """The kernel's, up to those of the exchange."""
        c, (keys, values) = self.config, map(one_launch._start, cache.layer(0))
        tensors = self.base, self.places, self.turns, self.token, self.kv_len, keys, values, self.logits, self.vectors
        return (*tensors, self.tickets, len(self.weights.layers), c.vocab, self.capacity, *self.ends, float(c.eps))


class OneLaunches:
    """A token on all devices of a kernels.collective.Group, or on this process's of a processes.Group.

    shares  an OneLaunchShare for each of the group's ranks here

    Between launches devices keep numbers that must go on together: all launch as many times, with one cache each.
    meet()  a barrier of all processes, if there are several: a launch with another cache makes the numbers anew.
    """

    def __init__(self, shares, group, meet=lambda: None):
        self.shares, self.group, self.meet = shares, group, meet
        self.hidden = shares[0].config.hidden
        numbers = 2 * 2 * len(group) * self.hidden  # of 4 bytes: two sites, dated numbers
        self.mail = group.mail(("one_launch", len(group.mails)), numbers, 1)  # in all processes the same key

    def launch(self, caches):
        """From each share's token and kv_len to its logits."""
        if not all(share.knows(cache) for share, cache in zip(self.shares, caches)):
            self._begin_anew(caches)
        group, mail = self.group, self.mail
        runs = [
            (share.kernel, share.grid, THREADS + 32,
             (*share.arguments(cache), mail.boxes[r], mail.peers, mail.numbers[r], group.told_args[r], r, group.limit,
              len(share.weights.embedding)),
             share.plan.shared)
            for share, cache, r in zip(self.shares, caches, group.ranks)
        ]  # fmt: skip
        group.launch("one_launch", runs, False)

    def _begin_anew(self, caches):
        """Tables for these caches; dates begin again, so no number of an earlier launch may be left."""
        self.group.synchronize()
        self.meet()
        for share, cache, rank in zip(self.shares, caches, self.group.ranks):
            share._prepare(cache)
            self.mail.boxes[rank].zero_()
        self.group.synchronize()
        self.meet()
