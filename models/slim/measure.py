"""Measure, on a machine with a card, what an environment with torch carries, what twelve workloads load of it, and what
becomes of copies without the rest.

    python -m models.slim.measure               writes models/slim/measured/<card>.json; some five minutes
    python -m models.slim.measure --memory      the tables of one workload's copy, memory and time alone; what else is
                                                stored stays

The environment is that of the Python that runs this. Copies are made beside it, or in the folder SLIM_WORK, and
removed again.
"""

import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kernels.bench import versions
from lab import cuda_timing, fatbin, results
from lab.roof_gpu import gpu_roof
from lab.table import Table
from models.slim import cut, explain, report, running, trace, tree, verify
from models.slim.problems import Problem
from models.slim.workloads import WORKLOADS

SCRIPT = Path(__file__).resolve().parent / "workloads.py"
AT_ONCE = 6  # processes on the card, where nothing is timed
PACKAGES = "torch", "torchaudio", "torchvision", "triton", "nvidia"  # torch, and what comes with it
TIMED = "llama_block"
SOURCES = tuple(f"models/slim/{name}" for name in ("choice.py", "inject.c", "running.py", "thin.py", "workloads.py"))
SOURCES += "lab/fatbin/entry.py", "lab/fatbin/reading.py"


def environment():
    """The folder of the environment that runs this: a virtual one, or the packages that have torch among them."""
    prefix = Path(sys.prefix)
    return tree.folder_of(prefix if (prefix / "pyvenv.cfg").is_file() else Path(torch.__file__).parent.parent)


def is_torchs(name):
    """Whether a library belongs to torch, or to what comes with it."""
    return name.rpartition("site-packages/")[2].rpartition("dist-packages/")[2].split("/")[0] in PACKAGES


def words_of(name):
    return ["python3", str(SCRIPT), name]


class Measuring:
    """One after another: what is there, what is loaded, copies, runs. say  is called with a line on what is done."""

    def __init__(self, folder, work, say, save=lambda tables: None):
        self.folder, self.work, self.say, self.save = folder, work, say, save
        major, minor = torch.cuda.get_device_capability()
        self.card, self.tables, self.made = (major, minor), [], {}

    def table(self, title, rows):
        self.tables.append(Table(title, rows, SOURCES))
        self.say(f"{self.tables[-1]}\n")
        self.save(self.tables)  # at once: a machine may be taken away

    def there(self):
        found = report.report(self.folder)
        found.libraries = [library for library in found.libraries if is_torchs(library.name)]
        self.table("Libraries, by their device code", found.library_table().rows)
        self.table("Device code, by what it is for", found.arch_table().rows)
        run = running.run([sys.executable, "-m", "models.slim", "report", str(self.folder)], results.ROOT)
        whole = {"libraries": len(found.libraries), "MB": found.size / 1e6, "device code, MB": found.stored / 1e6}
        whole |= {"unpacked, MB": found.unpacked / 1e6, "entries": found.entries}
        whole |= {"for this card, as it is": f"{100 * found.share_for(self.card):.1f} %"}
        whole |= {"report, s": run.seconds, "report, MB of memory": run.peak / 1e6}
        self.table("All of it", {"torch, and what comes with it": whole})

    def loaded(self):
        """Trace all workloads; returns their outputs."""
        by = trace.cupti(self.folder)

        def gathered(name):
            return trace.gather(self.folder, words_of(name), by=by)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(zip(WORKLOADS, pool.map(gathered, WORKLOADS)))
        if bad := [f"{name}: {run.errors.strip()[-300:]}" for name, (run, *_) in found.items() if run.code]:
            raise Problem("expected workloads that succeed where nothing was cut and found: " + "; ".join(bad))
        code, _ = cut.device_code(self.folder)
        cubins = sorted({cubin for _, some, _, _ in found.values() for cubin in some})
        launched = sorted({name for _, _, names, _ in found.values() for name in names})
        whole = trace.record(self.folder, ["all"], cubins, launched, code)
        self.trace, self.trace_of_one = self.work / "trace.json", self.work / "trace-of-one.json"
        self.trace.write_text(json.dumps(whole))
        _, some, names, _ = found[TIMED]
        self.trace_of_one.write_text(json.dumps(trace.record(self.folder, [TIMED], sorted(some), sorted(names), code)))
        _, others = trace.match(cubins, code)
        rows = {}
        for name, (_, some, names, _) in found.items():
            elsewhere = len(set(some) & set(others))
            rows[name] = {"modules": len(some), "of libraries": len(some) - elsewhere, "from elsewhere": elsewhere,
                          "kernels launched": len(names)}  # fmt: skip
        rows["all of them"] = {"modules": len(cubins), "of libraries": len(cubins) - len(others),
                               "from elsewhere": len(others), "kernels launched": len(launched)}  # fmt: skip
        self.table("Who is loaded", rows)
        return {name: run.output for name, (run, *_) in found.items()}

    def copy(self, name, traces, way="compacted"):
        """Make a copy, and note it if it is compacted. Returns where it is."""
        to = self.work / name.replace(", ", "-").replace(" ", "-")
        link = os.stat(self.folder).st_dev == os.stat(self.work).st_dev
        cut.cut(self.folder, to, [self.card], traces, way, link=link, say=lambda line: None)
        self.say(f"made: {name}")
        if way == "compacted":
            self.made[name] = to
        return to

    def copies(self, outputs):
        rows = {"as it comes": self._sizes(self.folder) | {"the same output": self._same(self.folder, outputs)}}
        for name, traces, way in [
            ("other architectures gone, holes", (), "holes"),
            ("other architectures gone, rewritten", (), "rewritten"),
            ("other architectures gone", (), "compacted"),
            ("only what is used", (self.trace,), "compacted"),
        ]:
            to = self.copy(name, traces, way)
            rows[name] = self._sizes(to) | {"the same output": self._same(to, outputs)}
            if way != "compacted":
                shutil.rmtree(to)
        self.table("Copies", rows)

    def copy_of_one(self, outputs):
        """For one workload alone: what the other eleven use is gone, too."""
        name = f"only what {TIMED} uses"
        to = self.copy(name, (self.trace_of_one,))
        self.table(
            f"A copy for {TIMED} alone", {name: self._sizes(to) | {"the same output": self._same(to, outputs, [TIMED])}}
        )

    def _sizes(self, folder):
        found = verify.sizes(folder, names=is_torchs)
        files = [file for file in tree.libraries(folder) if is_torchs(file.name)]
        device = sum(e.header + e.stored for file in files for e in fatbin.read(file.path))
        return found | {"device code, MB": device / 1e6}

    def _same(self, to, outputs, names=None):
        names = names or WORKLOADS

        def one(name):
            run = running.run(running.command_in(words_of(name), self.folder, to), to, verify.MODES["lazy"])
            if run.code:
                self.say(f"{name} in {to.name}: {run.errors.strip()[-300:]}")
            return run.code == 0 and run.output == outputs[name]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            same = dict(zip(names, pool.map(one, names)))
        lost = [name for name, right in same.items() if not right]
        return f"{sum(same.values())} of {len(same)}" + (f", not {', '.join(lost)}" if lost else "")

    def timed(self, repeats=2):
        rows = {}
        for mode, extra in verify.MODES.items():
            for name, where in {"as it comes": self.folder, **self.made}.items():
                words = running.command_in(words_of(TIMED), self.folder, where)
                tries = [running.run(words, where, extra) for _ in range(repeats)]
                best = min(tries, key=lambda run: run.seconds)
                rows[f"{mode}: {name}"] = verify.timed(best) | ({"ended with": best.code} if best.code else {})
        self.table(f"Memory and time of {TIMED}", rows)

    def asked_for_more(self):
        """What a copy of what is used says to a workload that no trace has."""
        to = self.made["only what is used"]
        run = running.run(running.command_in(words_of("unseen"), self.folder, to), to, verify.MODES["lazy"])
        last = run.errors.strip().splitlines() or [""]
        said = next((line for line in reversed(last) if explain.misleading(line)), last[-1])
        lines = explain.explain(self.folder, to, words_of("unseen"))
        cut_ones = [line for line in lines if line.endswith(" was cut")]
        rows = {"CUDA's words": {"what": f"ended with {run.code}: {said.strip()}"}}
        rows |= {"explain, kernels named": {"what": len(cut_ones)}, "explain, the first": {"what": lines[0]}}
        self.table("A kernel that was cut", rows)


def main(arguments):
    """Measure, print, store."""
    if arguments not in ([], ["--memory"]):
        print(f"models.slim.measure: expected nothing or --memory, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    cuda_timing.expect_gpu("what workloads load")
    folder, roof, memory_alone = environment(), gpu_roof(), bool(arguments)
    beside = os.environ.get("SLIM_WORK") or (folder.parent if os.access(folder.parent, os.W_OK) else None)
    work = Path(tempfile.mkdtemp(prefix="slim-work-", dir=beside))

    def save(tables):
        tables = tables[1:] if memory_alone else tables  # but for who is loaded, which stands there already
        results.save(results.ROOT / "models" / "slim", [], roof, versions(), tables=tables, keep=memory_alone)

    try:
        one = Measuring(folder, work, lambda line: print(line, flush=True), save)
        if memory_alone:
            outputs = one.loaded()
            one.copy("other architectures gone", ())
            one.copy("only what is used", (one.trace,))
        else:
            one.there()
            outputs = one.loaded()
            one.copies(outputs)
        one.copy_of_one(outputs)
        one.timed()
        if not memory_alone:
            one.asked_for_more()
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"written: {results.file_of(roof.card)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
