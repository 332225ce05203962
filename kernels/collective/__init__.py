"""Sums over devices: memory that several cards share, by loads and stores over the link.

    all_reduce([x0, x1])        each device's tensor becomes the sum of all, in place

Each rung takes a list of tensors, one for each of 2 to 8 devices, of one shape and dtype, float32, float16 or bfloat16,
sums in float32 in the order of the list, rounds once, and leaves the same bits on all devices. They have one signature:

    rung(tensors, *, group=None, pdl=False)     -> tensors

    tensors  contiguous, on different cards that reach each other's memory (NVLink, or PCIe with peer access), in one
             process; or all on the CPU, where they stand for devices of the SIMT machine
    group    a Group of these devices, with mailboxes of its own; None: one that is kept. All exchanges of a group are
             made in one order: by one thread, on the streams that are current on each card. Or a processes.Group,
             where each process of torch.distributed has one device: then tensors is a list of one
    pdl      True: each launch may start before the one ahead of it on its card has ended (not `copies`)

    copies -> pull -> pull_once -> ll -> sentinel -> direct          and for long messages two_shot

`all_reduce` takes the best of `direct` and two_shot by size. all_reduce_norm adds the sum to a residual and norms it;
product makes the sum in the epilogue of a matrix-vector product. No multicast is used.

Any size is legal, 0 included, and any alignment that the dtype allows; -0 may come back as +0. On cards all is
asynchronous. A device that waits for a peer in vain gives up after some seconds; the next call, or group.synchronize(),
raises PeerTimeout, which names both; a plain RuntimeError says that a call was cut off when some devices had their
launch. In a CUDA graph all but `copies` may be captured, one graph for each card (lab.cuda.Devices.graph). TypeError or
ValueError names the argument before anything runs; NoPeerAccess two cards that cannot reach each other: `copies` works
there, through the host.

Source: NCCL's LL protocol, TensorRT-LLM's and vLLM's one-shot and two-shot kernels, by idea.
"""

import functools

from torch.compiler import is_dynamo_compiling

from kernels.collective import launches, operators
from kernels.collective.arguments import expect_group, expect_tensors
from kernels.collective.fused import all_reduce_norm, product
from kernels.collective.group import Group, PeerTimeout, group_of
from lab import Rung

__all__ = [
    "RUNGS", "Group", "PeerTimeout", "all_reduce", "all_reduce_norm", "best", "copies", "direct", "ll", "product",
    "pull", "pull_once", "sentinel", "two_shot", "work",
]  # fmt: skip

WAY_THERE = 3.6e-6  # seconds that two_shot's barriers take beyond a push
LINK = 370e9  # bytes a second of stores to a peer: both measured on two H200s


def _rung(function, name=None):
    """A rung: arguments are looked at, and an empty message is not sent."""
    name = name or function.__name__

    @functools.wraps(function)
    def rung(tensors, *, group=None, pdl=False):
        expect_group(name, "tensors", tensors, group)
        expect_tensors(name, "tensors", tensors, count=len(group.ranks) if group is not None else None, written=True)
        if tensors[0].numel():
            function(tensors, group=group, pdl=pdl)
        return tensors

    return rung


@_rung
def copies(tensors, *, group=None, pdl=False):
    """Rung 1: the copy engines bring all messages to all devices, and a kernel adds. Needs no peer access."""
    launches.copies(tensors, pdl)


@_rung
def pull(tensors, *, group=None, pdl=False):
    """Rung 2: each device reads the others' messages, between two barriers."""
    launches.pull("pull", group or group_of(tensors), tensors, pdl, buffers=1)


@_rung
def pull_once(tensors, *, group=None, pdl=False):
    """Rung 3: the same with one barrier, and two buffers by turns."""
    launches.pull("pull_once", group or group_of(tensors), tensors, pdl, buffers=2)


@_rung
def ll(tensors, *, group=None, pdl=False):
    """Rung 4: messages are pushed, each 4 bytes with a flag. At most 4 MiB on cards, as for the next two."""
    launches.push("ll", group or group_of(tensors), tensors, pdl)


@_rung
def sentinel(tensors, *, group=None, pdl=False):
    """Rung 5: the data are their own flag."""
    launches.push("sentinel", group or group_of(tensors), tensors, pdl)


@_rung
def direct(tensors, *, group=None, pdl=False):
    """Rung 6: the same with fewer loads in a row; a thread has one word."""
    launches.push("direct", group or group_of(tensors), tensors, pdl)


@_rung
def two_shot(tensors, *, group=None, pdl=False):
    """For long messages: each device sums one share, and hands it to all."""
    launches.two_shot(group or group_of(tensors), tensors, pdl)


def all_reduce(tensors, *, group=None, pdl=False):
    """The best by size: `direct` or two_shot. torch.compile takes it, without a group."""
    if group is None and is_dynamo_compiling():
        _operator(tensors, pdl)
        return tensors
    return _all_reduce(tensors, group=group, pdl=pdl)


def _by_size(tensors, *, group=None, pdl=False):
    group = group or group_of(tensors)
    if best(tensors[0].nbytes, len(group), launches.most_bytes(group)) == "direct":
        launches.push("direct", group, tensors, pdl)
    else:
        launches.two_shot(group, tensors, pdl)


_all_reduce = _rung(_by_size, "all_reduce")
_operator = operators.register(_all_reduce)


def best(message, devices, most):
    """Which of the two is quicker for a message of so many bytes, by what each moves; most: bytes that fit a mailbox.

    A push sends devices - 1 messages, two shots 2 (devices - 1) / devices of one, WAY_THERE later. For two devices the
    bytes are the same, and only the mailbox ends it.
    """
    more = (devices - 1) * (1 - 2 / devices) * message / LINK
    return "direct" if message <= most and more <= WAY_THERE else "two_shot"


def work(tensors):
    """(bytes that each device sends over the link at least, flops of each): a message once, for two devices."""
    x, devices = tensors[0], len(tensors)
    return 2 * (devices - 1) * x.nbytes // devices, (devices - 1) * x.numel()


COMMON = "kernels/collective/launches.py", "kernels/collective/group.py"
RUNGS = [
    Rung("copies", "copy engines, and a launch that adds", copies, ("kernels/collective/add.cu", *COMMON)),
    Rung("pull", "peer loads between two barriers", pull, ("kernels/collective/pull.cu", *COMMON)),
    Rung("pull_once", "one barrier, two buffers", pull_once, ("kernels/collective/pull_once.cu", *COMMON)),
    Rung("ll", "words with a flag, pushed", ll, ("kernels/collective/ll.cu", *COMMON)),
    Rung("sentinel", "data that are their own flag", sentinel, ("kernels/collective/sentinel.cu", *COMMON)),
    Rung("direct", "fewer loads in a row", direct, ("kernels/collective/direct.cu", *COMMON)),
    Rung("two_shot", "each sums a share", two_shot, ("kernels/collective/two_shot.cu", *COMMON)),
]
