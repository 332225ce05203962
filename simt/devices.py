"""Several devices: launches that run at one time, over memory that all of them see, as cards over NVLink do.

    devices = simt.Devices(2, check_races=True)
    devices.owns(0, box0), devices.owns(1, box1)            whose memory it is
    devices.run([(push, grid, block, (x0, box1, ...)),      one launch on each device, or a list of them, one after
                 (push, grid, block, (x1, box0, ...))])     the other

    simt.together(launches)                                 the same, of devices that are needed once

The devices take turns (`turns`): each runs until it waits for another, or, with a seed, for a random number of steps.
An array has one address, which is good on all devices. Launches of one device run one after the other; those of two
are in no order but by flags that both look at, with a scope of .sys. So with check_races=True a buffer that one device
fills again before another has read it is a race of two launches, whatever the turns were.
"""

import itertools
import threading

import numpy as np

from simt.counting import counting
from simt.errors import Deadlock, LaunchError, SimtError
from simt.execute.scheduler import Launch
from simt.kernel import Kernel, Parameters, index, room, sequence, short, start_of, whole
from simt.memory.ahead import Ahead, after
from simt.memory.races import Races
from simt.memory.spaces import REGION, Space
from simt.report import GLOBAL_OPS, LINK, Report

MOST = 16  # devices
FIRST_REGION = 1 << 12  # of the memory that devices share: behind those of any program's own variables
PACES, ROUNDS = 7, 16  # random turns have up to 2**(PACES - 1) steps, by a pace drawn anew every ROUNDS
OPTIONS = {"shared", "places", "order", "ahead", "pdl", "step_limit"}
RUNNING = threading.Lock()  # the programs of the devices are used by one run at a time


class Memory:
    """One array's memory: its Space, which all launches that are given it have in common."""

    def __init__(self, array, owner, region, misalignment=0):
        self.start, self.end, self.named = start_of(array), start_of(array) + array.nbytes, False
        data, address = array.reshape(-1).view(np.uint8), (region << REGION) + misalignment
        self.space = Space("memory", data, address, array.nbytes, writable=array.flags.writeable, dtype=array.dtype)
        self.space.owner = owner


class DeviceLaunch(Launch):
    """A launch on one of several devices. number: its place among those of its device, from 1 on."""

    def begin(self, devices, device, number, base, ahead):
        self.devices, self.device, self.number, self.race_base = devices, device, number, base
        self.on = f" of device {device}" + (f" in its launch {number}" if number > 1 else "")
        self.numbers = base + np.arange(self.grid[0] * self.grid[1] * self.grid[2])
        if self.races is not None:
            self.races.knowledge.begin_launch(self.numbers, device, ahead)

    def of_block(self, number):
        return next(launch for launch in self.devices.begun if number in launch.numbers)

    def lacking(self, race, first, second):
        """Of two devices: has one filled again what the other has yet to read? What it takes, in words."""
        if first.device == second.device:
            return ""
        again = [race.first[0] == "load", second.number < first.number]  # read, and then written; written too early
        writer, reader = (second, first) if again[0] else (first, second)
        if any(again) and race.second[0] != race.first[0] and not race.need.startswith("they are on"):
            return (
                f"nothing tells device {writer.device} that device {reader.device} has read it: that takes a barrier "
                "of both at the end, behind the last read, or a second buffer, filled by turns"
            )
        if race.need:
            return race.need.replace("__threadfence()", "__threadfence_system()")
        return "they are on different devices: only a release and an acquire of scope .sys put them in order"


class Devices:
    """So many devices. check_races: look for races of all that runs until synchronize(), also between launches."""

    def __init__(self, count, check_races=False):
        n = index(count)
        if n is None or not 1 <= n <= MOST:
            raise LaunchError(f"count: expected 1 to {MOST} devices; got {short(count)}")
        self.count, self.check_races = n, bool(check_races)
        self.kept = {}  # (module, device) -> the bytes of its variables
        self.owned, self.regions = [], itertools.count(FIRST_REGION)
        self.synchronize()

    def synchronize(self):
        """The host has waited for all devices: all that comes is behind all that was."""
        self.memories, self.begun = list(self.owned), []
        self.races = Races(several=True) if self.check_races else None
        self.clocks, self.launches, self.blocks = [None] * self.count, [0] * self.count, 0
        self.left = [None] * self.count  # what the last launch of each may still be at

    def owns(self, device, *arrays):
        """These arrays lie in this device's memory: whatever another reads or writes there goes over the link. Of what
        is not said, an array that the launches of one device alone are given is that device's."""
        if index(device) is None or not 0 <= device < self.count:
            raise LaunchError(f"device: expected 0 to {self.count - 1}; got {short(device)}")
        for a in arrays:
            if not isinstance(a, np.ndarray) or not a.flags.c_contiguous or a.dtype.hasobject:
                raise LaunchError(f"arrays: expected C-contiguous NumPy arrays of numbers; got {short(a)}")
            if a.nbytes:
                self.expect_apart(a, "arrays")
                self.owned.append(Memory(a, device, next(self.regions)))
                self.memories.append(self.owned[-1])

    def run(self, launches, turns="forward", owned=None):
        """Run launches on all devices, by turns, until all have ended. Their Reports, in the same arrangement.

        launches   for each device (kernel, grid, block, args), or with a dict of options behind: shared, places, order,
                   ahead, step_limit, as a Kernel takes them, and pdl: it may start before the device's launch ahead of
                   it has ended; or a list of such, which run one after the other
        turns      "forward": device 0 goes first, and each goes on until it waits; "reverse": the last goes first; a
                   whole number: the seed of random turns, in which devices change their pace
        owned      for each device a list of arrays in its memory, as owns() takes them, for this run

        A report also counts simt__link_bytes_op_{ld,st,red,atom}.sum, what went to and from other devices' memory: 32
        for each sector of it that a request touches.
        """
        turns = sequence(turns)
        if not isinstance(launches, (list, tuple)) or len(launches) != self.count:
            got = len(launches) if isinstance(launches, (list, tuple)) else short(launches)
            raise LaunchError(f"launches: expected a list with an item for each of {self.count} devices; got {got}")
        streams = [item if isinstance(item, list) else [item] for item in launches]
        checked = [[check(device, item) for item in stream] for device, stream in enumerate(streams)]
        if owned is not None and (not isinstance(owned, (list, tuple)) or len(owned) != self.count):
            raise LaunchError(f"owned: expected a list of arrays for each of {self.count} devices; got {short(owned)}")
        if not self.check_races:
            self.memories, self.begun = list(self.owned), []
        with RUNNING:
            for device, arrays in enumerate(owned or ()):
                for a in arrays:
                    if a.nbytes and self.memory_of(a) is None:
                        self.expect_apart(a, "owned")
                        self.memories.append(Memory(a, device, next(self.regions)))
            self.find_memory(checked)
            bound = [[self.bind(device, *item) for item in stream] for device, stream in enumerate(checked)]
            with np.errstate(all="ignore"):
                reports = self.take_turns(bound, turns)
        return [found if isinstance(item, list) else found[0] for item, found in zip(launches, reports)]

    # Memory.

    def find_memory(self, checked):
        """Give each array an address and a name, largest first: what lies in another array has that one's."""
        found = []  # array, misalignment, device, name
        for device, stream in enumerate(checked):
            for kernel, _, _, args, _ in stream:

                def note(arrays, region, device=device):
                    found.extend((a, misalignment, device, name) for _, name, a, misalignment in arrays if a.nbytes)
                    return {}, dict.fromkeys((key for key, *_ in arrays), 0)

                kernel.bind(args, kernel.on(device), note)
        for a, misalignment, device, _ in sorted(found, key=lambda item: (start_of(item[0]), -item[0].nbytes)):
            if self.memory_of(a) is None:
                self.expect_apart(a, "args")
                low, high = start_of(a), start_of(a) + a.nbytes
                there = {d for b, _, d, _ in found if start_of(b) < high and low < start_of(b) + b.nbytes}
                owner = device if len(there) == 1 else None
                self.memories.append(Memory(a, owner, next(self.regions), misalignment))
        names = {m.space.name for m in self.memories if m.named}
        for own in True, False:  # as its owner calls it, if it is given it
            for a, _, device, name in found:
                memory = self.memory_of(a)
                owner = memory.space.owner
                if memory.named or (own and owner != device):
                    continue
                name += "" if owner is None else f" of device {owner}"
                memory.space.name = name if name not in names else f"{name}, array {len(names)}"
                names.add(memory.space.name)
                memory.named = True

    def memory_of(self, a):
        low, high = start_of(a), start_of(a) + a.nbytes
        return next((m for m in self.memories if m.start <= low and high <= m.end), None)

    def expect_apart(self, a, name):
        low, high = start_of(a), start_of(a) + a.nbytes
        if any(m.start < high and low < m.end for m in self.memories):
            raise LaunchError(
                f"{name}: expected memory of its own, or all inside an array that was there before; got an array of "
                f"{a.nbytes} bytes that overlaps one: say owns() of the whole array first"
            )

    def put(self, arrays, region):
        """As simt.kernel.place."""
        spaces, addresses = {}, {}
        for key, name, a, _ in arrays:
            if not a.nbytes:
                region += 1
                spaces[region] = Space(name, np.zeros(0, np.uint8), region << REGION, 0, dtype=a.dtype)
                addresses[key] = region << REGION
                continue
            memory = self.memory_of(a)
            spaces[memory.space.origin >> REGION] = memory.space
            addresses[key] = memory.space.origin + start_of(a) - memory.start
        return spaces, addresses

    # Launches.

    def bind(self, device, kernel, grid, block, args, options):
        """What begins the launch: its DeviceLaunch, given the Knowledge of what ran ahead of it."""
        program = kernel.on(device)
        values, spaces, maps = kernel.bind(args, program, self.put)
        if (kernel.module, device) not in self.kept:
            self.kept[kernel.module, device] = {name: data.copy() for name, data in kernel.module.kept.items()}
        kept = self.kept[kernel.module, device]

        def begin():
            program.start()
            own = program.global_spaces(kept)
            for space in own.values():
                space.name = f"{space.name} of device {device}"
            buffers = own | spaces
            arrays = [s.bytes for s in spaces.values()] + [m.array for m in maps.values()]
            ahead = options.get("ahead") or (self.left[device] if options.get("pdl") else None)
            launch = DeviceLaunch(
                program, grid, block, Parameters(program, values), buffers, options.get("shared", 0), self.races,
                options.get("step_limit"), maps, options.get("places"), options.get("order", "forward"), None,
                ahead and ahead.touches([b.bytes for b in buffers.values()]), 1, counting(),
            )  # fmt: skip
            self.launches[device] += 1
            launch.begin(self, device, self.launches[device], self.blocks, self.clocks[device])
            self.blocks += len(launch.numbers)
            self.begun.append(launch)
            launch.kernel, launch.arrays = kernel, arrays
            return launch

        return begin

    def take_turns(self, bound, turns):
        """The reports of all launches, by device."""
        random = np.random.default_rng(turns) if type(turns) is int else None
        reports, running = [[] for _ in bound], {}
        for turn in itertools.count():
            if random is not None and turn % ROUNDS == 0:  # so that one device at times is far ahead
                paces = 2 ** random.integers(0, PACES, len(bound))
            for device, stream in enumerate(bound):
                if device not in running and len(reports[device]) < len(stream):
                    running[device] = stream[len(reports[device])]()
            if not running:
                return reports
            line = sorted(running, reverse=turns == "reverse") if random is None else random.permutation([*running])
            quiet = True
            for device in map(int, line):
                launch = running[device]
                launch.until = None if random is None else launch.steps + int(random.integers(1, paces[device] + 1))
                quiet &= self.guarded(launch, launch.turn)
                if launch.ended():
                    reports[device].append(self.end(running.pop(device)))
                    quiet = False
            if running and quiet and all(launch.stuck() for launch in running.values()):
                self.report_deadlock(running)
            for launch in running.values():
                launch.quiet = quiet

    def guarded(self, launch, step):
        """What goes wrong on a device, with the device in front."""
        try:
            return step()
        except MemoryError as error:
            raise LaunchError(f"device {launch.device}: {launch.kernel.name}: too little memory") from error
        except SimtError as error:
            error.args = (f"device {launch.device}: {error.args[0]}", *error.args[1:])
            if launch.printed:
                error.add_note("printed until then:\n" + "".join(launch.printed))
            raise error from None

    def end(self, launch):
        """A launch has ended: its Report."""
        if self.races is not None:
            now = self.races.event()
            self.clocks[launch.device] = self.races.knowledge.end_launch(launch.numbers, now)
        program, kernel = launch.program, launch.kernel
        counts = program.counts() if launch.counted else None
        report = Report(kernel.name, kernel.module.source, counts, "".join(launch.printed), launch.grid, launch.block)
        report.waited, report.waits_first = launch.waited, program.waits_first
        report.ahead = None if launch.written is None else after(launch.written, launch.arrays)
        self.left[launch.device] = report.ahead
        if report.counted:
            for op in GLOBAL_OPS:
                report.counters.setdefault(LINK.format(op), 0)
        return report

    def report_deadlock(self, running):
        found = []
        for device, launch in sorted(running.items()):
            launch.until = None
            try:
                launch.report_deadlock()
            except Deadlock as error:
                found.append(f"device {device}: {error}")
        over = [str(device) for device in range(self.count) if device not in running]
        if over:
            found.append(f"no launch is under way on device {' and '.join(over)}")
        raise Deadlock("; ".join(found))


def together(launches, owned=None, check_races=False, turns="forward"):
    """Run launches on several devices once: see Devices.run. owned: for each device a list of arrays in its memory."""
    if not isinstance(launches, (list, tuple)):
        raise LaunchError(f"launches: expected a list with an item for each device; got {short(launches)}")
    return Devices(len(launches), check_races).run(launches, turns, owned)


def check(device, item):
    """(kernel, grid, block, args, options), or an error."""
    where = f"launches: device {device}"
    if not isinstance(item, tuple) or len(item) not in (4, 5) or not isinstance(item[0], Kernel):
        raise LaunchError(f"{where}: expected (kernel, grid, block, args) or with options behind; got {short(item)}")
    kernel, grid, block, args, options = item if len(item) == 5 else (*item, {})
    if not isinstance(args, (tuple, list)) or not isinstance(options, dict) or not options.keys() <= OPTIONS:
        known = ", ".join(sorted(OPTIONS))
        raise LaunchError(f"{where}: expected a tuple of arguments and options of {known}; got {short(item[3:])}")
    options = dict(options)
    grid, block, options["shared"] = kernel.check_shape(grid, block, options.get("shared", 0))
    if options.get("step_limit") is not None:
        options["step_limit"] = whole("step_limit", options["step_limit"])
    options["places"], options["order"] = room(options.get("places")), sequence(options.get("order", "forward"))
    if not isinstance(options.get("ahead"), (Ahead, type(None))):
        raise LaunchError(f"{where}: ahead: expected a simt.Ahead, or None; got {short(options['ahead'])}")
    return kernel, grid, block, args, options
