"""What a link between two cards takes, by hand: python -m kernels.collective.link

A load, a fence and a flag by one thread, in ns; loads and stores of many, in GB/s. Needs two cards that reach each
other's memory, and says so plainly where there are none. Stored as tables in
kernels/collective/measured/<card>_x2_link.json. On the SIMT machine, Link(["cpu", "cpu"]), the same kernels count:

    link = Link(["cpu", "cpu"])
    link.chase(link.chain(100, 64), 1, 30)[0].counters["simt__link_bytes_op_ld.sum"]
"""

import functools

import numpy as np
import torch

from kernels.bench import versions
from kernels.collective.group import CARD_LIMIT, HERE, MACHINE_LIMIT, PeerTimeout
from lab import cuda, gpu_roof, results
from lab.table import Table

WAYS = {  # of telling a peer a number
    "flag_relaxed": "a flag, relaxed",
    "flag_word": "data and number in one word of 16 bytes",
    "flag_released": "a flag, release and acquire",
    "data_and_flag": "data, then a flag, release and acquire",
}
BLOCKS, THREADS = (1, 2, 4, 8, 16, 32, 64, 128), 512
STREAMED = 256 << 20  # bytes that many threads load or store; and half of them, for the difference
NEAR, FAR = (8192, 32), (32768, 2048)  # links of a chain, and numbers of 4 bytes between them: 1 MB, 256 MB
FLUSHED = 256 << 20  # bytes, more than an L2 cache has
FEW, MANY = 2000, 8000  # steps of two runs; their difference has no launch in it
REPEATS = 9


class Link:
    """Two devices, and the kernels that measure what lies between them. On the CPU a call returns its reports."""

    def __init__(self, where, races=False):
        self.devices = cuda.Devices(where, races)
        if len(self.devices) != 2:
            raise ValueError(f"Link: where must be two devices, got {len(self.devices)}")
        self.kernels = cuda.load(HERE / "link.cu", ("-DDEVICES=2",))
        self.out = self.devices.zeros(1, torch.int32)
        self.mails = self.devices.zeros(8, torch.int32)
        self.told = torch.zeros(1, dtype=torch.int32, pin_memory=self.devices.on_cards)
        self.limit = CARD_LIMIT if self.devices.on_cards else MACHINE_LIMIT
        self.number = 1

    def chain(self, links, apart, seed=0):
        """On each device a ring of so many links, `apart` numbers of 4 bytes from one to the next, in random order."""
        order = np.random.default_rng(seed).permutation(links)
        order = np.roll(order, -int(np.flatnonzero(order == 0)[0])) * apart  # it begins at 0
        ring = np.zeros(links * apart, np.int32)
        ring[order] = np.roll(order, -1)
        chains = self.devices.zeros(ring.size, torch.int32)
        for chain in chains:
            chain.copy_(torch.from_numpy(ring))
        return chains

    def chase(self, chains, device, steps):
        """Device 0 makes so many loads from a device's chain, one after another."""
        return self._alone(self.kernels.chase, 1, 1, cuda.Peers(chains), device, steps)

    def store_and_fence(self, device, steps, system):
        """Device 0 stores to a device's memory, and waits for each store."""
        return self._alone(self.kernels.store_and_fence, 1, 1, cuda.Peers(self.mails), device, steps, int(system))

    def flag(self, way, rounds):
        """A number goes from device 0 to device 1 and back, so many times; PeerTimeout if one does not come."""
        first, self.number = self.number, self.number + rounds
        told, mails = cuda.Peers([self.told]), cuda.Peers(self.mails)
        reports = self.devices.launch(
            [(self.kernels[way], 1, 1, (self.out[r], mails, r, first, rounds, self.limit, told)) for r in (0, 1)]
        )
        if not self.devices.on_cards:
            self.check()
        return reports

    def stream(self, name, words, blocks, both=False, threads=THREADS, seed=7):
        """name: load_words or store_words. Device 0, or each, loads or stores all of the other's `words`."""
        more = (seed,) if name == "store_words" else ()
        count = words[0].numel() * 4 // 16
        launches = [
            (self.kernels[name], blocks, threads, (self.out[r], cuda.Peers(words), 1 - r, count, *more))
            if r == 0 or both else None
            for r in (0, 1)
        ]  # fmt: skip
        return self.devices.launch(launches)

    def check(self):
        """Raise if a device has given up waiting."""
        self.devices.synchronize()
        if self.told[0]:
            raise PeerTimeout(f"link: device {int(self.told[0]) - 1} did not answer within {self.limit} looks")

    def _alone(self, kernel, grid, block, *args):
        return self.devices.launch([(kernel, grid, block, (self.out[0], *args)), None])


def seconds(devices, launch, before=None):
    """The median of what launch() takes on the card that is longest at it."""
    taken = []
    for _ in range(REPEATS + 1):
        if before:
            before()
        devices.synchronize()
        marks = []
        for device in devices.where:
            with torch.cuda.device(device):
                marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                marks[-1][0].record()
        launch()
        for device, (_, end) in zip(devices.where, marks):
            with torch.cuda.device(device):
                end.record()
        devices.synchronize()
        taken.append(max(a.elapsed_time(b) for a, b in marks))
    return 1e-3 * float(np.median(taken[1:]))


def each(devices, run, before=None):
    """ns of one step of run(steps)."""
    few, many = (seconds(devices, functools.partial(run, steps), before) for steps in (FEW, MANY))
    return 1e9 * (many - few) / (MANY - FEW)


def latencies(link):
    """{what: {"ns": ...}} of one thread."""
    near, far = link.chain(*NEAR), link.chain(*FAR)
    flush = [torch.empty(FLUSHED, dtype=torch.uint8, device=device) for device in link.devices.where]

    def emptied():
        for buffer in flush:
            buffer.zero_()

    found = {}
    for device, whose in ((0, "own"), (1, "the peer's")):
        link.chase(near, device, NEAR[0])  # so that L2 has it
        found[f"load, {whose} L2"] = each(link.devices, functools.partial(link.chase, near, device))
        found[f"load, {whose} HBM"] = each(link.devices, functools.partial(link.chase, far, device), emptied)
    for device, system, name in ((0, False, "own, .gpu"), (0, True, "own, .sys"), (1, True, "the peer's, .sys")):
        run = functools.partial(link.store_and_fence, device, system=system)
        found[f"store and fence, {name}"] = each(link.devices, run)
    for way, name in WAYS.items():
        found[f"one way: {name}"] = each(link.devices, functools.partial(link.flag, way)) / 2
        link.check()
        if int(link.out[1]) != MANY:
            raise RuntimeError(f"{way}: {int(link.out[1])} numbers came, not {MANY}")
    return {name: {"ns": ns} for name, ns in found.items()}


def bandwidths(link):
    """{what: {blocks: GB/s}} of one direction."""
    words, found = link.devices.zeros(STREAMED // 4, torch.int32), {}
    for tensor in words:
        tensor.copy_(torch.randint(-(1 << 31), 1 << 31, tensor.shape, device=tensor.device).int())
    for name in "load_words", "store_words":
        for both in (False, True):
            row = found.setdefault(f"{name.split('_')[0]}s{', both cards at a time' * both}", {})
            for blocks in BLOCKS:
                whole, half = (
                    seconds(link.devices, functools.partial(link.stream, name, part, blocks, both))
                    for part in (words, [tensor[: tensor.numel() // 2] for tensor in words])
                )
                row[str(blocks)] = 1e-9 * STREAMED / 2 / (whole - half)  # no launch in it
    return found


def main():
    if torch.version.cuda is None or torch.cuda.device_count() < 2:
        raise SystemExit("the link's bench needs two cards that reach each other's memory, and there are fewer")
    link = Link(["cuda:0", "cuda:1"])
    card = torch.cuda.get_device_name(0)
    sources = "kernels/collective/link.cu", "kernels/collective/link.py", "lab/cuda/devices.py"
    tables = [
        Table(f"the link, one thread, 2 × {card}", latencies(link), sources),
        Table(f"the link, GB/s by blocks of {THREADS} threads, 2 × {card}", bandwidths(link), sources),
    ]
    print(*tables, sep="\n\n")
    print(results.save(HERE, [], gpu_roof(), versions(), tables=tables, name="x2 link"))


if __name__ == "__main__":
    main()
