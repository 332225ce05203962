"""A launch over several devices: on the SIMT machine, and as cards are asked for it, by a driver that only notes."""

import struct

import pytest
import torch

import simt
from lab import cuda, cuda_driver
from lab.cuda import devices as module
from lab.cuda import peers
from lab.cuda.peers import Peers

SOURCE = r"""
struct Both { float *of[2]; };
extern "C" __global__ void swap(float *x, unsigned *flag, const __grid_constant__ Both boxes, unsigned *theirs,
                                int rank) {
    griddepcontrol();
    const unsigned number = flag[1] + 1;
    boxes.of[1 - rank][threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(number) : "memory");
        unsigned seen;
        do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen < number);
        flag[1] = number;
    }
    __syncthreads();
    x[threadIdx.x] = 2 * boxes.of[rank][threadIdx.x];
    __syncthreads();
}
""".replace("griddepcontrol();", 'asm volatile("griddepcontrol.wait;" ::: "memory");')


def pair(races=False):
    devices = cuda.Devices(["cpu", "cpu"], races=races)
    boxes, flags = devices.zeros(32, torch.float32), devices.zeros(2, torch.int32)
    xs = [torch.arange(32.0), torch.arange(32.0) + 100]
    kernel = cuda.compile(SOURCE).swap

    def step():
        # one buffer and no second barrier: one exchange at a time
        return devices.launch(
            [(kernel, 1, 32, (xs[d], flags[d], Peers(boxes), flags[1 - d].view(torch.int32), d)) for d in (0, 1)],
            pdl=True,
        )

    return devices, xs, step


def test_a_launch_on_each_device_of_the_machine():
    devices, xs, step = pair()
    reports = step()
    assert torch.equal(xs[0], 2 * (torch.arange(32.0) + 100)) and torch.equal(xs[1], 2 * torch.arange(32.0))
    assert [r.counters["simt__link_bytes_op_st.sum"] for r in reports] == [128 + 32] * 2
    step()
    assert torch.equal(xs[0], 4 * torch.arange(32.0))


def test_a_graph_replays_what_was_launched_by_turns_and_races_are_seen():
    devices, xs, step = pair()
    graph = devices.graph(step)
    assert torch.equal(xs[0], torch.arange(32.0))  # not launched yet
    for turns in "forward", "reverse", 5:
        devices.turns = turns
        graph.replay()
    assert torch.equal(xs[1], 8 * torch.arange(32.0))
    devices, xs, step = pair(races=True)
    step()
    devices.synchronize()
    step()
    with pytest.raises(simt.RaceError, match="a barrier of both at the end"):
        devices.graph(step).replay()


def test_wrong_devices_and_launches_are_named():
    for where, error, words in (
        ([], ValueError, "must be cards, or the CPU for each, got"),
        (["cpu", "cuda:0"], ValueError, "must be cards, or the CPU for each"),
        (["cuda:0", "cuda:0"], ValueError, "different cards by number"),
        (["cuda"], ValueError, "different cards by number"),
    ):
        with pytest.raises(error, match=words):
            cuda.Devices(where)
    with pytest.raises(ValueError, match="races are looked for on the SIMT machine"):
        cuda.Devices(["cuda:0", "cuda:1"], races=True)
    devices, xs, step = pair()
    kernel = cuda.compile(SOURCE).swap
    with pytest.raises(ValueError, match="a launch for each of 2 devices, got 1"):
        devices.launch([(kernel, 1, 32, ())])
    with pytest.raises(TypeError, match="boxes must be a NumPy scalar of 16 bytes .Both., got void"):
        devices.launch([(kernel, 1, 32, (xs[0], xs[0], Peers([xs[0]] * 3), xs[0], 0))] * 2)
    with pytest.raises(TypeError, match="tensor 1 must be a torch tensor or None, got list"):
        Peers([xs[0], []])
    with pytest.raises(ValueError, match="tensor 0 must be contiguous"):
        Peers([torch.ones(4, 4)[:, 0]])


class Driver:
    """Cards that note what they are asked for. pairs: (a, b) where a may see b's memory."""

    def __init__(self, pairs):
        self.pairs, self.enabled, self.current = pairs, [], None

    def cuDeviceGet(self, found, index):
        found._obj.value = index
        return 0

    def cuDeviceCanAccessPeer(self, found, a, b):
        found._obj.value = int((a.value, b.value) in self.pairs)
        return 0

    def cuDevicePrimaryCtxRetain(self, found, handle):
        found._obj.value = 100 + handle.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.current = context.value - 100
        return 0

    def cuCtxEnablePeerAccess(self, context, flags):
        again = (self.current, context.value - 100) in self.enabled
        self.enabled.append((self.current, context.value - 100))
        return peers.ALREADY_SEES if again else 0


class Nothing:
    def __init__(self, *_):
        pass

    __enter__ = __exit__ = lambda *_: None


def made_up(monkeypatch, pairs):
    made = Driver(pairs)
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", Nothing)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(peers.torch, "zeros", lambda *_, device: type("T", (), {"to": lambda *_: None})())
    return made


def test_cards_are_made_to_see_each_other(monkeypatch):
    made = made_up(monkeypatch, {(0, 1), (1, 0)})
    cuda.Devices(["cuda:0", "cuda:1"])
    assert made.enabled == [(0, 1), (1, 0)]
    cuda.Devices(["cuda:1", "cuda:0"])  # a second time is no error
    with pytest.raises(cuda.NoPeerAccess, match="cuda:0 cannot read and write the memory of cuda:2"):
        cuda.Devices(["cuda:0", "cuda:2"])


def test_a_launch_on_cards_hands_over_addresses_and_loads_everything_first(monkeypatch):
    made_up(monkeypatch, {(0, 1), (1, 0)})
    devices = cuda.Devices(["cuda:0", "cuda:1"])
    done = []

    class Kernel(module.Kernel):
        def __init__(self, name):
            self.name = name

        def _function(self, device):
            done.append(("load", self.name, device))

        def __call__(self, grid, block, *args, **options):
            done.append(("checked", self.name, args, options))

        def unchecked(self, grid, block, *args, **options):
            done.append(("unchecked", self.name, args, options))

    a, b = Kernel("a"), Kernel("b")
    x = torch.ones(4)
    boxes = Peers([x, None])
    for _ in range(2):
        devices.launch([(a, 1, 32, (x, boxes)), (b, 1, 32, (x, 7), 48)], pdl=True)
    assert done[:2] == [("load", "a", 0), ("load", "b", 1)]
    assert [d[0] for d in done[2:]] == ["checked", "checked", "unchecked", "unchecked"]
    pointers = struct.pack("=2Q", x.data_ptr(), 0)
    assert done[2][2][1].tobytes() == done[4][2][1] == pointers
    assert done[3][3] == done[5][3] == {"shared": 48, "pdl": True}
    with pytest.raises(TypeError, match="takes kernels of lab.cuda, got str"):
        devices.launch([("a", 1, 32, (x,)), None])
