"""Measure every ladder on this machine and store the figures: `make bench`, or `python -m kernels.bench [topic ...]`.

Each topic's bench module measures its rungs and the peers that are installed, side by side, and the figures go to
kernels/<topic>/measured/<card>.json. The GPU's topics need an NVIDIA GPU. The topic `readme` measures nothing, and
draws the README's tables and picture anew from the stored files; on the card that the README shows it comes last.

A long topic can be measured in parts, one after another: `ssd:lengths`, `ssd:shapes`, `ssd:studies`. What is stored of
the others stays, if it was measured with the code as it is.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path

from kernels.headline import headline
from lab import compiler, gpu_roof, results, roof

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "gemv" / "measured" / "ladder.png"
GPU_TOPICS = ["gemv", "fusion", "lowbit", "attention", "kv_cache", "ssd", "matmul"]
TOPICS = ["roof", "cpu_matmul", "cpu_gemv", *GPU_TOPICS]
PARTS = {"ssd": ("lengths", "shapes", "studies")}  # of a topic; the last has what is no ladder, too
STUDIES = ("ssd",)  # topics that have a module for what is no ladder
README_CARD, README_LADDER = "NVIDIA H200", "GEMV bf16, 14336 × 4096"
README_COLUMNS = ("rung", "time", "p20 – p80", "as called", "rate", "of the roof", "speed-up")


def versions():
    """What the figures depend on besides the sources."""
    found = {"python": platform.python_version(), "compiler": compiler.compiler_version(), "cuda driver": _driver()}
    peers = "gemlite", "flashinfer-python", "mamba-ssm"
    for package in ("numpy", "torch", "triton", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", *peers):
        try:
            found[package] = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found | {"ssd_fused5.py": _fused_file()}


def _fused_file():
    """The published fused SSD kernel is a file without a version: the beginning of its hash, if it was imported."""
    module = sys.modules.get("mamba_ssm.ops.triton.ssd_fused5")
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:12] if module else "none"


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
    topic, _, part = topic.partition(":")
    bench = importlib.import_module(f"{__package__}.{topic}.bench")
    ladders = bench.ladders(parts=(part,)) if part else bench.ladders()
    rest = not part or part == PARTS[topic][-1]
    studies = importlib.import_module(f"{__package__}.{topic}.studies") if topic in STUDIES else bench
    tables = getattr(studies, "tables", list)() if rest else []
    for found in (*ladders, *tables):
        print(f"\n{found}")
    about = gpu_roof() if topic in GPU_TOPICS else roof(), versions()
    paths = [results.save(HERE / topic, ladders, *about, tables=tables, keep=bool(part))]
    return paths + studies.further(*about) if rest and hasattr(studies, "further") else paths


def readme_ladder():
    """The ladder that the README shows, from the stored results of README_CARD."""
    for item in results.stored("gemv"):
        if item.card == README_CARD:
            return item.ladder(README_LADDER)
    raise results.ResultsError(f"there are no stored results of gemv on an {README_CARD} yet: run `make bench` there")


def readme():
    """Draw the README's tables and picture anew from the stored results."""
    ladder = readme_ladder()
    if importlib.util.find_spec("matplotlib") is None:
        print("bench: without matplotlib the README is not drawn; elsewhere: python -m kernels.bench readme")
        return
    ladder.bars().savefig(PICTURE, dpi=110)
    path = results.ROOT / "README.md"
    text = replace_block(path.read_text(), "ladder", ladder_block(ladder))
    text = replace_block(text, "headline", headline(README_CARD))
    path.write_text(replace_picture(text, picture_line(ladder)))


def ladder_block(ladder):
    """The README's table of a ladder, in Markdown, with where its figures come from."""
    note = "time: in a CUDA graph, weights not in the cache; as called: from Python, one call after another"
    return f"{ladder.markdown(README_COLUMNS)}\n\n*{ladder.source}; {note}*"


def picture_line(ladder):
    """The README's picture of a ladder, in Markdown."""
    says = f"The ladder {ladder.title} on an {README_CARD}: each rung as percent of the measured read bandwidth"
    return f"![{says}]({PICTURE.relative_to(results.ROOT).as_posix()})"


def replace_picture(text, line):
    """Replace the line that shows a ladder's picture."""
    text, found = re.subn(r"^!\[[^\]]*\]\(\S+/ladder\.png\)$", lambda _: line, text, flags=re.M)
    if found != 1:
        raise ValueError(f"the README must show a ladder.png once, on a line of its own; found {found}")
    return text


def replace_block(text, name, content):
    """Replace what stands between <!-- name:begin --> and <!-- name:end -->."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n{content}\n{end}{after}"


def main(arguments):
    """Measure the topics named (default: all). Returns the exit status."""
    parts = [f"{topic}:{part}" for topic in PARTS for part in PARTS[topic]]
    if unknown := [a for a in arguments if a not in (*TOPICS, *parts, "readme")]:
        print(f"bench: no topic named {', '.join(unknown)}; there are: {', '.join([*TOPICS, *parts])}, readme")
        return 2
    topics = arguments or TOPICS
    if not os.access(results.ROOT, os.W_OK):
        print("bench: the course's folder is read-only, so the figures could not be stored: nothing was measured")
        return 1
    status = 0
    on_gpu = [topic for topic in topics if topic.partition(":")[0] in GPU_TOPICS]
    if ("roof" in topics or on_gpu) and gpu_roof() is None:
        print(
            f"No NVIDIA GPU on this machine: the GPU's roof and ladders ({', '.join(GPU_TOPICS)}) are not measured, "
            "and those stored stay as they are."
        )
        status = int(bool(set(on_gpu) & set(arguments)))  # asked for by name, and not done
        topics = [topic for topic in topics if topic not in on_gpu]
    if not arguments and gpu_roof() is not None and gpu_roof().card == README_CARD:
        topics = [*topics, "readme"]
    for topic in topics:
        if topic == "readme":
            readme()
            continue
        for path in measure(topic):
            print(f"wrote {path.relative_to(results.ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
