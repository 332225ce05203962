"""What the checks of CUDA kernels share: compile, launch, compare, and count.

Every chapter's checks run the learner's CUDA C++ on the SIMT machine: the verdict is the same with and without a GPU.
"""

import numpy as np

import simt
from exercises.checks import counted
from lab.check import differs, is_unset
from lab.exercise import NOT_DONE, Wrong
from simt.kernel_names import so_named

STEPS = 30_000  # an endless loop is stopped after so many steps of the machine
PRINTED_LINES = 20  # a check shows so many lines of what a kernel's printf wrote
BLOCK = 256


def compiled(source, name, *, behind="", options=(), arch="sm_90"):
    """The kernel `name` of the learner's source; what is wrong with the source is raised as a sentence.

    behind  CUDA C++ that the check puts behind the learner's
    """
    lines_shown[0] = 0
    if not isinstance(source, str):
        raise Wrong(f"expected CUDA C++ source as a string, got {type(source).__name__}")
    whole = f'{source}\n#line 1 "the check"\n{behind}' if behind else source
    try:
        module = simt.compile(whole, options, arch, f"{name}.cu")
        if name not in module.entries and so_named(name, module.entries):
            raise Wrong(  # the machine would find it; a launch on a card does not
                f"no kernel is called {name!r}, since C++ adds its parameters to a name. "
                'Write extern "C" before __global__'
            )
        return module[name]
    except simt.CompileError as error:
        if NOT_DONE in str(error):
            raise NotImplementedError(NOT_DONE) from None
        text = str(error)
        for option in options:
            text = text.replace(option.removeprefix("-I") + "/", "")  # no folder of this machine before a header's name
        raise Wrong(text) from None
    except (simt.LaunchError, simt.Unsupported) as error:
        raise Wrong(str(error)) from None


def launched(kernel, grid, block, *args, at, hint="", tell=None, **how):
    """Run the kernel on the machine; return its report. `at` says in a message which case this was.

    hint  what else is said of a loop that does not end
    tell  tell(error) is what a message says of an error of the machine, where its own text would not do
    how   check_races=True, by_warp=True, places, order: see simt.Kernel
    """
    try:
        report = kernel(grid, block, *args, step_limit=STEPS, **how)
    except simt.LaunchError as error:
        raise Wrong(f"{error}. Keep the kernel's name and parameters as in the stub") from None
    except simt.StepLimit:
        found = f"at {at} the kernel was still running after {STEPS:,} steps: is there an endless loop?{hint}"
        raise Wrong(found) from None
    except simt.SimtError as error:
        raise Wrong(tell(error) if tell else f"at {at}: {error}") from None
    if report.printed and lines_shown[0] < PRINTED_LINES:
        _show_printed(report.printed.splitlines(), at)
    return report


lines_shown = [0]  # how many lines of printf this check has shown; a check launches a kernel many times


def _show_printed(lines, at):
    left = PRINTED_LINES - lines_shown[0]
    lines_shown[0] += len(lines)
    print(f"printf at {at}:", *lines[:left], sep="\n")
    if lines_shown[0] >= PRINTED_LINES:
        print("(The rest of what printf wrote is left out. An `if` around it picks the case and the thread to see.)")


def compare(name, got, wanted, at):
    """Raise Wrong unless both arrays are equal; outputs are `unset` before a launch."""
    bad = np.argwhere(~(got == wanted))
    if not len(bad):
        return
    place = tuple(map(int, bad[0]))
    index = ", ".join(map(str, place))
    what = differs(f"{name}[{index}]", got[place], wanted[place]) + _of_nan(got[place])
    raise Wrong(f"wrong at {at}: {len(bad)} of {counted(got.size, 'element')} of {name} differ. {what}")


def _of_nan(got):
    """Where a NaN may come from that was computed."""
    if not np.isnan(got) or is_unset(got):
        return ""
    return ": NaN comes of 0 / 0, of inf - inf, or of another NaN"


def unchanged(arrays, before, at):
    """Raise Wrong if a kernel has changed its inputs. Both: {name: array}."""
    for name, array in arrays.items():
        if not np.array_equal(array, before[name]):
            raise Wrong(f"at {at} the kernel changed {name}, which it should only read")


def coalesced(report, at, most=4):
    """Raise Wrong if a request touches more than `most` sectors on average."""
    for op, word in (("ld", "load"), ("st", "store")):
        each = report.sectors_per_request(op)
        if each > most:
            raise Wrong(
                f"right, but not coalesced: at {at} a {word} of a warp touches {each:.3g} sectors on average, "
                f"wanted: at most {most}"
            )


def requests(report, op):
    return report.counters[f"l1tex__t_requests_pipe_lsu_mem_global_op_{op}.sum"]


def in_registers(kernel, at):
    """Raise Wrong if threads load from local memory: an array of their own that is not in registers."""
    program = kernel.program
    found = next((i for i in program.flow.function.instructions if i.parts[0] == "ld" and "local" in i.parts), None)
    if found:
        raise Wrong(
            f"right, but at {at} line {found.line}{program.quote(found.line)} loads from local memory: an array of a "
            "thread that is in no register, since the compiler does not know which of its elements is meant"
        )


def by_warp(report, name="l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"):
    """Requests of each block and warp, (blocks, warps): loads from global memory, if nothing else is said."""
    return report.by_warp.get(name, np.zeros((1, 1), int))


def shared_out(made, who, at, what="load requests"):
    """Raise Wrong unless those along the last axis share the work: nobody does half as much again as the mean."""
    made = made.reshape(-1, made.shape[-1])
    busiest = made[np.argmax(made.max(axis=1) / np.maximum(made.sum(axis=1), 1))]
    if busiest.max() > 1.5 * busiest.mean():
        raise Wrong(
            f"right, but not shared: at {at} {who} {busiest.argmax()} makes {busiest.max():,} of {busiest.sum():,} "
            f"{what}; {len(busiest)} that share them evenly make {busiest.mean():.3g} each"
        )


def whole_numbers(rng, *shape):
    """Small random whole numbers, none of them 0, as float32: sums of them are exact in any order."""
    return (rng.integers(1, 5, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def blocks_for(n, block=BLOCK):
    return -(-n // block)


def near(name, got, wanted, tolerance, at, size=None):
    """Raise Wrong unless all elements are within a tolerance of `size`: the largest, if nothing else is said.

    Outputs are `unset` before a launch.
    """
    size = max(np.abs(wanted).max(), 1e-30) if size is None else size
    with np.errstate(invalid="ignore"):
        bad = np.argwhere(~(np.abs(got - wanted) <= tolerance * size))
    if not len(bad):
        return
    place = tuple(map(int, bad[0]))
    index = ", ".join(map(str, place))
    text = differs(f"{name}[{index}]", got[place], wanted[place]) + _of_nan(got[place])
    raise Wrong(f"wrong at {at}: {len(bad)} of {counted(got.size, 'element')} of {name} differ. {text}")
