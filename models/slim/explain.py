"""A workload fails in a copy: which kernels did it ask for that were cut, and how are they kept?

CUDA's words mislead: where a container is empty, "invalid device ordinal", "no kernel image is available" or "unable to
find an engine" is what a program says. What it asked for is seen by running it once more where nothing was cut.
"""

import re

from models.slim import cut, trace, tree
from models.slim.problems import Problem

MISLEADING = re.compile(
    "no kernel image is available|invalid device ordinal|invalid device function|unable to find an engine|"
    "named symbol not found|NO_BINARY_FOR_GPU|device kernel image is invalid|invalid resource handle|"
    "CUBLAS_STATUS_(?:ARCH_MISMATCH|NOT_SUPPORTED|EXECUTION_FAILED)|CUDNN_STATUS_\\w+",
    re.I,
)


def misleading(text):
    """The first of CUDA's words in a text that may mean a kernel is missing; None if there are none."""
    match = MISLEADING.search(text)
    return match[0] if match else None


def cut_record(tree_of, folder):
    """What was cut from a copy. Problem if it is none, or one of another environment."""
    record = cut.read_json(tree_of / cut.NAME, "COPY", "a folder that `cut` made")
    if record["from"] != str(folder):
        raise Problem(f"COPY: expected a copy of {folder} and found one of {record['from']}")
    return record


def missing(record, used, launched, code):
    """[(library, arch, kernel), ...]: what a workload launches and the copy lacks.

    record  of the cut;  used {library: {entry.at, ...}} and launched names: of a trace where nothing was cut
    """
    found = []
    for file, entries in code.items():
        gone = set(record["libraries"].get(file.name, {}).get("cut", ())) & used.get(file.name, set())
        for entry in entries:
            if entry.at in gone:
                names = sorted(set(entry.kernels) & set(launched)) or list(entry.kernels)[:1] or ["(without a name)"]
                found += [(file.name, entry.arch, name) for name in names]
    return found


def sentences(found, record, folder, copy, failed=()):
    """What is said: each kernel by name, and the commands that keep it."""
    if not found:
        lines = [f"CUDA refused to launch {name or 'a kernel'} (error {error})" for error, name in failed]
        return [*lines, "no kernel that this command loads was cut: it fails for another reason"]
    lines = [f"{library}: {name} ({arch}) was cut" for library, arch, name in found]
    keep = " ".join(f"--keep-arch {arch}" for arch in record["keep"])
    if record["used"]:
        traces = " ".join(f"--used {path}" for path in record["used"])
        lines += [
            "to keep what this command loads, trace it, and cut again with both traces:",
            f"  python -m models.slim trace {folder} --out more.json -- COMMAND",
            f"  python -m models.slim cut {folder} {keep} {traces} --used more.json --to {copy}.new",
        ]
    else:
        numbers = sorted({arch.removeprefix("sm_").rstrip("af") for _, arch, _ in found})
        more = " ".join(f"--keep-arch {number[:-1]}.{number[-1]}" for number in numbers)
        lines.append("to keep it, cut again for this card too:")
        lines.append(f"  python -m models.slim cut {folder} {keep} {more} --to {copy}.new")
    return lines


def explain(folder, copy, command):
    """[sentence, ...] on why a command fails in a copy. Runs it twice, traced: there, and where nothing was cut."""
    folder, copy = tree.folder_of(folder), tree.folder_of(copy, "COPY")
    record = cut_record(copy, folder)
    code, _ = cut.device_code(folder)
    now = cut.hashes(code)
    if changed := sorted(name for name, was in record["libraries"].items() if now.get(name) != was["sha256"]):
        raise Problem(f"ENVIRONMENT: expected the libraries that were cut and found another version of {changed[0]}")
    try:
        _, _, _, failed = trace.gather(folder, command, where=copy)
    except Problem:  # it did not get as far as a card
        failed = ()
    done, cubins, launched, _ = trace.gather(folder, command)
    if done.code:
        return [f"the command fails in {folder}, too, where nothing was cut: it ended with {done.code}"]
    used, _ = trace.match(cubins, code)
    return sentences(missing(record, used, launched, code), record, folder, copy, failed)
