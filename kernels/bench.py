"""Measure every ladder on this machine and store the figures: `make bench`, or `python -m kernels.bench [topic ...]`.

Each topic's bench module measures its rungs and the peers that are installed, side by side, and the figures go to
kernels/<topic>/measured/<card>.json. The GPU's topics need an NVIDIA GPU. The topic `readme` measures nothing, and
draws the README's tables and picture anew from the stored files; on the card that the README shows it comes last.

A long topic can be measured in parts, one after another: `ssd:lengths`, `ssd:shapes`, `ssd:studies`. And of a topic on
the GPU a run can measure less:

    --only TEXT    the ladders with this text in their titles (may be given again: one of the texts)
    --headline     the ladders that the README's headline shows
    --changed      the ladders that are not stored, or rest on code that has changed since
    --called       of what is stored, the times as called from Python alone; the times in graphs stay as they are

What is stored of the others stays, marked stale where it rests on code that has changed. Each ladder is stored as soon
as it is measured. What is no ladder (trials, tables) is measured where nothing is left out.
"""

import argparse
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import time
import traceback
from pathlib import Path

from kernels import beside, running
from kernels.headline import CASES, headline
from lab import compiler, gpu_roof, results, roof

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "gemv" / "measured" / "ladder.png"
GPU_TOPICS = [
    "gemv",
    "fusion",
    "lowbit",
    "attention",
    "kv_cache",
    "paged",
    "latent",
    "ssd",
    "ssd_backward",
    "matmul",
    "llm",
    "mamba2",
]
TOPICS = ["roof", "cpu_matmul", "cpu_gemv", "cpu_llm", *GPU_TOPICS]
PARTS = {"ssd": ("lengths", "shapes", "studies")}  # of a topic; the last has what is no ladder, too
STUDIES = ("ssd", "llm", "mamba2")  # topics that have a module for what is no ladder
README_CARD, README_LADDER = "NVIDIA H200", "GEMV bf16, 14336 × 4096"
README_COLUMNS = ("rung", "time", "p20 – p80", "as called", "processor", "rate", "of the roof", "speed-up")


def versions():
    """What the figures depend on besides the sources."""
    found = {"python": platform.python_version(), "compiler": compiler.compiler_version(), "cuda driver": _driver()}
    peers = "gemlite", "flashinfer-python", "mamba-ssm", "transformers"
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


def measure(topic, options=None):
    """Measure one topic, store it, print its tables, and return the paths written. options: those of the command"""
    if topic == "roof":
        found = [(roof(), "lab/roof.c"), (gpu_roof(), "lab/roof_cuda.py")]
        return [results.save(results.ROOT / "lab", [], r, versions(), [source]) for r, source in found if r]
    topic, _, part = topic.partition(":")
    bench = importlib.import_module(f"{__package__}.{topic}.bench")
    about = gpu_roof() if topic in GPU_TOPICS else roof()
    with running.set_to(_run(topic, about, options)):
        ladders = bench.ladders(parts=(part,)) if part else bench.ladders()
        left_out = running.narrowed()
    gc.unfreeze()  # what benching.empty has put out of sight
    rest = not left_out and (not part or part == PARTS[topic][-1])
    studies = importlib.import_module(f"{__package__}.{topic}.studies") if topic in STUDIES else bench
    tables = getattr(studies, "tables", list)() if rest else []
    for found in (*ladders, *tables):
        print(f"\n{found}")
    if left_out:  # each of them was stored as it was measured
        return [HERE / topic / "measured" / results.file_of(about.card)] if ladders else []
    about = about, versions()
    paths = [results.save(HERE / topic, ladders, *about, tables=tables, keep=bool(part))]
    return paths + studies.further(*about) if rest and hasattr(studies, "further") else paths


def _run(topic, about, options):
    """The running.Run that the command asks for. about: the roof of what is measured"""
    if topic not in GPU_TOPICS:
        return running.Run()
    if options is None:
        return running.Run(store=functools.partial(_store, topic, about, False))
    stored = next((item for item in results.stored(topic) if item.card == about.card), None)
    if options.called and stored is None:
        raise results.ResultsError(f"nothing of {topic} is stored for {about.card}: there is no ladder to call again")
    shown = [case.ladder for case in CASES if case.topic == topic] if options.headline else []
    return running.Run(
        only=(*options.only, *shown),
        called=options.called,
        stored={ladder.title: ladder for ladder in stored.ladders} if stored else {},
        changed=options.changed,
        current=stored.current(options.called) if stored else set(),
        store=functools.partial(_store, topic, about, options.called),
    )


def _store(topic, about, called, ladder):
    """Put a ladder that was measured just now beside what is stored of the others."""
    if called:
        results.save_called(HERE / topic, [ladder], about.card, versions())
    else:
        results.save(HERE / topic, [ladder], about, versions(), keep=True)


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
    if "processor" in ladder.headings:
        note += "; processor: its part of that"
    columns = [column for column in README_COLUMNS if column in ladder.headings]
    return f"{ladder.markdown(columns)}\n\n*{ladder.source}; {note}*"


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


def _options(arguments):
    """What the command's arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description="Measure ladders and store them.")
    parser.add_argument("topics", nargs="*", help=f"of {', '.join(TOPICS)}; default: all")
    parser.add_argument(
        "--only", metavar="TEXT", action="append", default=[], help="ladders with this text in the title"
    )
    parser.add_argument("--headline", action="store_true", help="the ladders that the README's headline shows")
    parser.add_argument("--changed", action="store_true", help="ladders that are not stored, or rest on changed code")
    parser.add_argument("--called", action="store_true", help="the times as called alone, of what is stored")
    return parser.parse_args(arguments)


def main(arguments):
    """Measure the topics named (default: all). Returns the exit status: 1 where one failed, and said why."""
    options = _options(arguments)
    arguments, less = options.topics, any((options.only, options.headline, options.changed, options.called))
    parts = [f"{topic}:{part}" for topic in PARTS for part in PARTS[topic]]
    if unknown := [a for a in arguments if a not in (*TOPICS, *parts, "readme")]:
        print(f"bench: no topic named {', '.join(unknown)}; there are: {', '.join([*TOPICS, *parts])}, readme")
        return 2
    if less and (others := [a for a in arguments if a.partition(":")[0] not in GPU_TOPICS]):
        print(
            f"bench: --only, --headline, --changed and --called are for the GPU's topics, not for {', '.join(others)}"
        )
        return 2
    arguments = arguments or (GPU_TOPICS if less else [])
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
        begin = time.perf_counter()
        try:
            for path in measure(topic, options):
                print(f"wrote {path.relative_to(results.ROOT)}")
        except Exception:  # which must not keep the other topics from being measured
            traceback.print_exc(file=sys.stdout)
            status = 1
        if topic.partition(":")[0] in GPU_TOPICS:
            print(f"{topic}: {time.perf_counter() - begin:.0f} s in all", flush=True)
    if on_gpu and gpu_roof() is not None and gpu_roof().card != README_CARD:
        beside.show([topic.partition(":")[0] for topic in on_gpu], gpu_roof().card)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
