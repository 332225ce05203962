"""Measure every ladder on this machine and store the figures: `make bench`, or `python -m kernels.bench [topic ...]`.

Each topic's bench module measures its rungs and the peers that are installed, side by side, and the figures go to
kernels/<topic>/measured/<card>.json. For authors: the topic `readme` measures nothing, and draws the README's table and
picture anew from the stored files.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

from lab import compiler, gpu_roof, results, roof

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "cpu_gemv" / "measured" / "ladder.png"
TOPICS = ["roof", "cpu_matmul", "cpu_gemv"]


def versions():
    """What the figures depend on besides the sources."""
    found = {"python": platform.python_version(), "compiler": compiler.compiler_version(), "cuda driver": _driver()}
    for package in ("numpy", "torch", "triton"):
        try:
            found[package] = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def _driver():
    try:
        version = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    return re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", version)[1]


def measure(topic):
    """Measure one topic, store it, print its tables, and return the paths written."""
    if topic == "roof":
        found = [(roof(), "lab/roof.c"), (gpu_roof(), "lab/roof_cuda.py")]
        return [results.save(results.ROOT / "lab", [], r, versions(), [source]) for r, source in found if r]
    ladders = importlib.import_module(f"kernels.{topic}.bench").ladders()
    for ladder in ladders:
        print(f"\n{ladder}")
    return [results.save(HERE / topic, ladders, roof(), versions())]


def readme_ladder():
    """The ladder that the README shows: GEMV, from the stored results of the machine with the most threads."""
    found = [item for item in results.stored("cpu_gemv") if item.roof.by_threads]
    if not found:
        raise results.ResultsError("there are no stored results of cpu_gemv yet: run `make bench`")
    return max(found, key=lambda item: max(item.roof.by_threads)).ladder("GEMV 14336 × 4096")


def readme():
    """Draw the README's table and picture anew from the stored results."""
    ladder = readme_ladder()
    ladder.bars().savefig(PICTURE, dpi=110)
    path = results.ROOT / "README.md"
    path.write_text(replace_block(path.read_text(), "ladder", ladder_block(ladder)))


def ladder_block(ladder):
    """The README's table of a ladder, in Markdown, with where its figures come from."""
    return f"{ladder.markdown(('rung', 'time', 'p20 – p80', 'rate', 'of the roof', 'speed-up'))}\n\n*{ladder.source}*"


def replace_block(text, name, content):
    """Replace what stands between <!-- name:begin --> and <!-- name:end -->."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n{content}\n{end}{after}"


def main(arguments):
    """Measure the topics named (default: all). Returns the exit status."""
    if unknown := [a for a in arguments if a not in (*TOPICS, "readme")]:
        print(f"bench: no topic named {', '.join(unknown)}; there are: {', '.join(TOPICS)}, readme")
        return 2
    topics = arguments or TOPICS
    if not os.access(results.ROOT, os.W_OK):
        print("bench: the course's folder is read-only, so the figures could not be stored: nothing was measured")
        return 1
    if "roof" in topics and gpu_roof() is None:
        print("No NVIDIA GPU on this machine: the GPU's figures are not measured, and those stored stay as they are.")
    for topic in topics:
        if topic == "readme":
            readme()
            continue
        for path in measure(topic):
            print(f"wrote {path.relative_to(results.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
