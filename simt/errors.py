"""What can go wrong, as types: each message is meant to be read by the author of the kernel."""


class CompileError(Exception):
    """The compiler refused the source.

    The message shows the first errors with their source lines; `log` is all that the compiler said.
    """

    def __init__(self, message, log=""):
        super().__init__(message)
        self.log = log


class CompilerMissing(Exception):
    """There is no NVRTC on this machine: CUDA C++ cannot be compiled here. PTX text still runs, by simt.load(ptx)."""


class SimtError(Exception):
    """What a kernel did wrong while it ran. The message names the kernel, the line, the block and the thread."""


class Unsupported(SimtError):
    """An instruction that the machine does not know. `where` names kernel and line, once they are known."""

    def __init__(self, instruction, why="", line=0, where=""):
        before, after = f"{where}: " if where else "", f": {why}" if why else ""
        super().__init__(f"{before}{instruction}: not supported by the SIMT machine{after}")
        self.instruction, self.why, self.line, self.where = instruction, why, line, where


class MemoryFault(SimtError):
    """An access out of bounds, misaligned, to a read-only array, or to what nothing has been written to."""


class UnsetRegister(SimtError):
    """A value that nothing has set is stored, branched on, used as an address, or given to other lanes."""


class BarrierFault(SimtError):
    """Threads of a block wait at different barriers, or part of a warp at one that the others leave out."""


class ScopeFault(SimtError):
    """An access to another device's memory that is to order something, and whose scope stays on its own device."""


class LaneFault(SimtError):
    """An instruction for lanes together (a shuffle, a vote) that not all the lanes it names have reached, or a shuffle
    that reads a lane which has no part in it."""


class AsyncFault(SimtError):
    """Something asynchronous used against its rules: an mbarrier, a bulk copy, a wgmma that was not waited for."""


class Deadlock(SimtError):
    """Every thread that is left waits, and nothing can change what it waits for."""


class StepLimit(SimtError):
    """The launch has run for more steps than it may: an endless loop, most likely."""


class Trap(SimtError):
    """The kernel stopped itself: assert() failed, or __trap()."""


class LaunchError(ValueError):
    """A launch that cannot be: a wrong argument, grid, block, or amount of shared memory, or no such kernel."""
