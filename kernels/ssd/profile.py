"""What Nsight Compute counts of chapter 12's and 13's kernels: `python -m kernels.ssd.profile` (needs a GPU and ncu).

One call of each, on 64K tokens of the 2.7B model's layer, cold. Stored in measured/<card>_ncu.json. Clocks are left as
they are, so times are near those of bench.py, and not the same.
"""

import csv
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from kernels.ssd import chunk_bmm, chunk_cumsum, chunk_scan, chunk_state, rungs, state_passing
from kernels.ssd.bench import LONG, inputs
from kernels.ssd.five import CHUNK, SOURCES, five
from kernels.ssd.fused import SOURCES as FUSED
from kernels.ssd.fused import fused
from kernels.ssd.published import published
from kernels.ssd.segments import walk
from kernels.ssd.tuned import tuned
from lab import results
from lab.table import Table

HERE = Path(__file__).resolve().parent
TITLE = "SSD, 64K: what Nsight Compute counts"
FIVE = (
    chunk_cumsum.cumsum_kernel,
    chunk_bmm.bmm_kernel,
    chunk_state.state_kernel,
    state_passing.passing_kernel,
    chunk_scan.scan_kernel,
)
KERNELS = {published: rungs.RUNGS[0], walk: rungs.RUNGS[3], tuned: rungs.RUNGS[4]}
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "ComputeWorkloadAnalysis")
BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
COLUMNS = {  # column: (metric, times)
    "time, µs": ("gpu__time_duration.sum", 1e-3),
    "registers": ("launch__registers_per_thread", 1),
    "occupancy, %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "compute, %": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "tensor cores, %": (TENSOR, 1),
    "memory, %": ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "L1 and shared, %": ("l1tex__throughput.avg.pct_of_peak_sustained_active", 1),
    "L2, %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "read, MB": (BYTES[0], 1e-6),
    "written, MB": (BYTES[1], 1e-6),
}
STALLED = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
SYNCHRONISING = ("barrier", "membar")  # waits for other warps of the block, and for a fence


def calls(call):
    """(row, function, names of its kernels in order, sources) of all that is profiled."""
    found = [(rung.title, rung.function, [kernel.fn.__name__], rung.sources) for kernel, rung in KERNELS.items()]
    found.append(("fused.cu", fused, ["fused"], FUSED))
    found.append((f"five, chunk {CHUNK}", five, [kernel.fn.__name__ for kernel in FIVE], SOURCES))
    return [
        (title, lambda function=function: function(**call), names, sources) for title, function, names, sources in found
    ]


def run():
    """In the process that ncu watches: call each, once that is not looked at and once that is."""
    call = inputs(LONG)
    for _, function, *_ in calls(call):
        function()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        function()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def command(names):
    """What to call, for kernels of these names."""
    chosen = "regex:^(" + "|".join(dict.fromkeys(names)) + ")$"
    watched = [sys.executable, "-m", "kernels.ssd.profile", "run"]
    asked = [f"--section={section}" for section in SECTIONS] + ["--metrics", ",".join((*BYTES, TENSOR))]
    how = ["--clock-control", "none", "--profile-from-start", "off", "--page", "raw", "--csv", "--print-units", "base"]
    return ["ncu", *how, *asked, "--kernel-name", chosen, *watched]


def counted(text):
    """ncu's table, a row for each launch -> [(kernel, {metric: number})]; what is no number is left out."""
    if '"ID"' not in text:
        raise RuntimeError(f"ncu gave no table: {text[-2000:]}")
    found = []
    for row in csv.DictReader(io.StringIO(text[text.index('"ID"') :])):
        if row["ID"]:  # the row below the headings has units
            numbers = {}
            for name, value in row.items():
                try:
                    numbers[name] = float(value.replace(",", ""))
                except (ValueError, AttributeError):
                    pass
            found.append((row["Kernel Name"], numbers))
    return found


def row(numbers):
    """The row of a table, of all that ncu has counted of a launch."""
    shown = {}
    for column, (name, times) in COLUMNS.items():
        if name in numbers:
            shown[column] = int(numbers[name]) if column == "registers" else round(times * numbers[name], 2)
    stalls = {match[1]: value for name, value in numbers.items() if (match := STALLED.fullmatch(name))}
    stalls.pop("selected", None)  # a warp that is issued does not wait
    total = sum(stalls.values())
    if total:
        shown["waits at barriers, %"] = round(100 * sum(stalls.get(name, 0) for name in SYNCHRONISING) / total, 2)
        for place, name in enumerate(sorted(stalls, key=stalls.get, reverse=True)[:2]):
            shown[("most waits", "then")[place]] = f"{name.replace('_', ' ')} {100 * stalls[name] / total:.0f} %"
    return shown


def table():
    """Profile all. Returns the Table, or None with a printed sentence where ncu is not there or may not count."""
    if shutil.which("ncu") is None:
        print("ncu (Nsight Compute) is not installed: what it counts is not measured, and what is stored stays")
        return None
    planned = calls(None)
    expected = [(title, name) for title, _, names, _ in planned for name in names]
    done = subprocess.run(
        command([name for _, name in expected]), cwd=results.ROOT, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        print(f"ncu failed, so what it counts is not measured, and what is stored stays: {_last(done)}")
        return None
    found = counted(done.stdout)
    if [name for name, _ in found] != [name for _, name in expected]:
        raise RuntimeError(f"ncu saw {[name for name, _ in found]}, and not {[name for _, name in expected]}")
    rows = {}
    for (title, name), (_, numbers) in zip(expected, found):
        many = sum(other == title for other, _ in expected) > 1
        rows[f"{title}: {name}" if many else title] = row(numbers)
    sources = dict.fromkeys(source for *_, each in planned for source in (*each, "kernels/ssd/profile.py"))
    return Table(TITLE, rows, tuple(sources))


def _last(done):
    """What ncu said of its failure."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return " ".join([line for line in lines if "==ERROR==" in line] or lines[-3:])


def store(roof, versions):
    """Profile all, and write the file. Returns the paths written."""
    found = table()
    if found is None:
        return []
    print(f"\n{found}")
    return [results.save(HERE, [], roof, versions, tables=[found], name="ncu")]


def main(arguments):
    """The command. Returns the exit status."""
    if arguments == ["run"]:
        run()
        return 0
    from kernels.bench import versions
    from lab import gpu_roof

    if gpu_roof() is None:
        print("No NVIDIA GPU on this machine: nothing is profiled, and what is stored stays as it is.")
        return 1
    for path in store(gpu_roof(), versions()):
        print(f"wrote {path.relative_to(results.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
