"""A workload in an environment and in its copy: is the output the same, and what became smaller?"""

from lab.table import Table
from models.slim import explain, running, tree
from models.slim.problems import Problem

MB = 1e6
MODES = {"lazy": {"CUDA_MODULE_LOADING": "LAZY"}, "eager": {"CUDA_MODULE_LOADING": "EAGER"}}


class _Counter:
    """A file that counts what is written to it."""

    def __init__(self):
        self.size = 0

    def write(self, data):
        self.size += len(data)
        return len(data)


def packed(files, level=3):
    """Bytes of tree.File objects, each packed with zstd: about what a download or an image layer has."""
    import zstandard

    counter = _Counter()
    for file in files:
        with open(file.path, "rb") as f:
            zstandard.ZstdCompressor(level=level, threads=-1).copy_stream(f, counter)
    return counter.size


def sizes(folder, zstd=True, names=lambda name: True):
    """{"files, MB", "on disk, MB", "zstd, MB"} of an environment's libraries, or of those whose names are asked for."""
    files = [file for file in tree.libraries(folder) if names(file.name)]
    found = {"files, MB": sum(f.size for f in files) / MB, "on disk, MB": sum(f.disk for f in files) / MB}
    return found | ({"zstd, MB": packed(files) / MB} if zstd else {})


def timed(done):
    """What a Run took, as columns of a table."""
    found = {"first output, s": done.first, "run, s": done.seconds, "peak memory, MB": done.peak / MB}
    return found | ({"card's memory, MB": done.gpu / MB} if done.gpu else {})


def compared(folder, copy, command, modes=MODES, repeats=1):
    """({mode: (Run there, Run in the copy)}, [what differs, ...]) of a command's words in both. Of several runs the
    quickest counts, and every one's output."""
    runs, problems, first = {}, [], None
    for mode in modes:
        pair = []
        for where in (folder, copy):
            words = running.command_in(command, folder, where)
            tries = [running.run(words, where, MODES[mode]) for _ in range(repeats)]
            for done in tries:
                if where == folder and done.code:
                    raise Problem(
                        f"verify: expected a command that succeeds in {folder} and found one that ended with "
                        f"{done.code}: {(done.errors.strip().splitlines() or ['it said nothing'])[-1]}"
                    )
                first = first if first is not None else done.output
                if where == folder and done.output != first:
                    raise Problem(
                        "verify: expected a command that writes the same each time and found one that does not, where "
                        "nothing was cut: let it print no times, and seed what is random"
                    )
                if where == copy and (problem := _differs(done, first)):
                    problems.append(f"{mode}: {problem}")
            pair.append(min(tries, key=lambda done: done.seconds))
        runs[mode] = tuple(pair)
    return runs, problems


def _differs(done, wanted):
    if done.code:
        words = explain.misleading(done.errors)
        last = (done.errors.strip().splitlines() or ["it said nothing"])[-1]
        hint = f' (CUDA\'s words for a kernel that is not there, among others: "{words}")' if words else ""
        return f"the copy's run ended with {done.code}: {last}{hint}"
    if done.output != wanted:
        lines = zip(done.output.splitlines(), wanted.splitlines())
        line = next((n for n, (a, b) in enumerate(lines, 1) if a != b), None)
        at = f"line {line} differs" if line else f"{len(done.output):,} bytes, expected {len(wanted):,}"
        return f"the copy's output is another: {at}"
    return ""


def table(before, after, runs):
    """A Table of sizes (`sizes`) and runs, with what changed in percent."""
    rows = {}
    for name in before:
        rows[name] = _row(before[name], after[name])
    for mode, pair in runs.items():
        there, here = map(timed, pair)
        rows |= {f"{mode}: {name}": _row(there[name], here[name]) for name in there if name in here}
    return Table("An environment and its copy", rows)


def _row(before, after):
    change = f"{100 * (after / before - 1):+.0f} %" if before else ""
    return {"before": before, "after": after, "": change}


def verify(folder, copy, command, *, modes=MODES, repeats=1, zstd=True):
    """(Table, [what differs or is missing, ...]): the list is empty if the copy does what the original does."""
    folder, copy = tree.folder_of(folder), tree.folder_of(copy, "COPY")
    explain.cut_record(copy, folder)
    runs, problems = compared(folder, copy, command, modes, repeats)
    if any(done.code for _, done in runs.values()):
        try:
            problems += explain.explain(folder, copy, command)
        except Problem as problem:
            problems.append(f"which kernels it asks for could not be traced: {problem}")
    return table(sizes(folder, zstd), sizes(copy, zstd), runs), problems
