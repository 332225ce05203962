"""Does `read` see what NVIDIA's cuobjdump sees?

    python -m lab.fatbin.agreement libcurand.so.10 libnccl.so.2 ...

For each file: cubins and PTX by architecture; and, where less than IMAGES bytes unpack from it, each image bit for bit
and each cubin's kernels. Ends with 1 if one differs.
"""

import collections
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.cuda.disassembly import find_tool
from lab.fatbin.reading import read

IMAGES = 200_000_000
FLAGS = {"elf": ("-lelf", "-xelf"), "ptx": ("-lptx", "-xptx")}


def differences(path, images=IMAGES):
    """(entries, whether images were compared, [what differs, ...]) of a file."""
    path, problems = Path(path).resolve(), []
    entries = [e for e in read(path) if e.kind in FLAGS]
    deep = sum(e.size for e in entries) <= images
    for kind, (listing, extracting) in FLAGS.items():
        ours = [e for e in entries if e.kind == kind]
        mine = collections.Counter(e.arch.rstrip("f") for e in ours)  # which cuobjdump does not show
        theirs = collections.Counter(re.findall(r"\.(sm_\w+)\.(?:cubin|ptx)$", _said(path, listing), flags=re.M))
        if mine != theirs:
            problems.append(f"{kind}: {dict(mine)}, and cuobjdump lists {dict(theirs)}")
        elif deep and ours:
            problems += _images(path, kind, extracting, ours)
    if deep and entries:
        problems += _kernels(path, [e for e in entries if e.kind == "elf"])
    return len(entries), deep, problems


def _said(path, *options, folder=None):
    command = [find_tool("cuobjdump"), "-all", *options, str(path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    return done.stdout


def _images(path, kind, option, ours):
    with tempfile.TemporaryDirectory() as folder:
        _said(path, option, "all", folder=folder)
        theirs = collections.Counter(_digest(p.read_bytes(), kind) for p in Path(folder).iterdir())
    mine = collections.Counter(_digest(e.image(), kind) for e in ours)
    lost, more = (mine - theirs).total(), (theirs - mine).total()
    return [f"{lost} images of {kind} that cuobjdump has not, {more} that it alone has"] if lost or more else []


def _digest(data, kind):
    return hashlib.sha256(data.rstrip(b"\0") if kind == "ptx" else data).hexdigest()


def _kernels(path, cubins):
    said = re.split(r"^Fatbin (?:elf|ptx) code:$", _said(path, "-symbols"), flags=re.M)
    theirs = [tuple(sorted(set(re.findall(r"STO_ENTRY\s+(\S+)", part)))) for part in said if "symbols:" in part]
    mine, theirs = (collections.Counter(filter(None, names)) for names in ([e.kernels for e in cubins], theirs))
    return [f"the kernels of {(mine - theirs).total()} cubins"] if mine != theirs else []


def main(paths):
    """Print a line for each file."""
    if not paths:
        print(__doc__)
        return 2
    worst = 0
    for path in paths:
        entries, deep, problems = differences(path)
        how = "and every image and kernel" if deep else "by architecture"
        print(f"{Path(path).name}: {entries:,} entries, {how}: " + ("; ".join(problems) or "agree"), flush=True)
        worst |= bool(problems)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
