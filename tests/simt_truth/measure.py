"""Run every launch on an NVIDIA GPU under Nsight Compute, and write what it counted to h200.json.

    PYTHONPATH=tests python -m simt_truth.measure h200.json        (needs a GPU, ncu, cupy)

The launches run in one process under ncu, in order. Each one's outputs are compared with NumPy's before anything is
written, and stored as a checksum beside the counters.
"""

import csv
import io
import json
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

from simt_truth import compute, memory

LAUNCHES = [*memory.LAUNCHES, *compute.LAUNCHES]
KINDS = ("ld", "st", "red", "atom")
METRICS = [
    *(f"l1tex__t_requests_pipe_lsu_mem_global_op_{k}.sum" for k in KINDS),
    *(f"l1tex__t_sectors_pipe_lsu_mem_global_op_{k}.sum" for k in KINDS),
    *(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{k}.sum" for k in ("ld", "st")),
    *(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{k}.sum" for k in ("ld", "st")),
    *(f"smsp__inst_executed_op_shared_{k}.sum" for k in ("ld", "st")),
    "smsp__inst_executed_op_ldgsts.sum",
    "smsp__inst_executed.sum",
    "smsp__thread_inst_executed_per_inst_executed.ratio",
]


def run(launch):
    """Launch on the GPU; return the output arrays."""
    import cupy

    options = ("-arch=sm_90", "-lineinfo", "--fmad=true", *launch.options)
    options = tuple(o for o in options if not o.startswith("-arch"))  # cupy names the card itself
    module = cupy.RawModule(code=launch.source, options=options, backend="nvrtc")
    buffers = [cupy.asarray(a.view(np.uint8) if a.ndim else a) if isinstance(a, np.ndarray) else a for a in launch.args]
    as3 = [tuple(np.atleast_1d(size).tolist()) for size in (launch.grid, launch.block)]
    kernel = module.get_function(launch.kernel)
    if launch.shared > 48 << 10:
        kernel.max_dynamic_shared_size_bytes = launch.shared
    kernel(*as3, tuple(buffers), shared_mem=launch.shared)
    cupy.cuda.runtime.deviceSynchronize()
    return [buffers[i].get().view(launch.args[i].dtype).reshape(launch.args[i].shape) for i in launch.outputs]


def problem(launch, got):
    """What differs from NumPy's outputs, or None."""
    for number, (have, want) in enumerate(zip(got, launch.expected(*launch.args), strict=True)):
        want = np.asarray(want, have.dtype).reshape(have.shape)
        same = have.tobytes() == want.tobytes() or np.array_equal(have, want, equal_nan=have.dtype.kind == "f")
        if not same and not (not launch.exact and np.allclose(have, want, rtol=1e-5, atol=1e-5)):
            first = np.argwhere(have != want)[:1].tolist()
            return f"output {number} differs first at {first}: {have[have != want][:4]} for {want[have != want][:4]}"
    return None


def checksum(arrays):
    """crc32 of the arrays' bytes. All NaNs count as one: which of them an operation gives is not specified."""
    plain = [np.where(np.isnan(a), np.array(np.nan, a.dtype), a) if a.dtype.kind == "f" else a for a in arrays]
    return zlib.crc32(b"".join(a.tobytes() for a in plain))


def run_all(path):
    """In the process that ncu watches: run each launch, write {name: [problem, checksum]}."""
    found = {}
    for launch in LAUNCHES:
        try:
            got = run(launch)
            found[launch.name] = [problem(launch, got), checksum(got)]
        except Exception as error:  # a launch that does not compile: name it, and go on with the others
            found[launch.name] = [f"{type(error).__name__}: {str(error)[:600]}", 0]
    Path(path).write_text(json.dumps(found))


def counters(text):
    """ncu's table, a row for each launch and metric -> [(kernel name, {metric: number})] in launch order."""
    rows = csv.DictReader(io.StringIO(text[text.index('"ID"') :]))
    found = {}
    for row in rows:
        value = row["Metric Value"].replace(",", "")
        found.setdefault(int(row["ID"]), (row["Kernel Name"], {}))[1][row["Metric Name"]] = float(value)
    return [found[i] for i in sorted(found)]


def main(target):
    """Measure, check that each row of ncu's is the launch we think it is, and write the file."""
    names = {launch.kernel for launch in LAUNCHES}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base", "--metrics", ",".join(METRICS)]
        command += ["--kernel-name", "regex:^(" + "|".join(sorted(names)) + ")$"]
        done = subprocess.run(
            [*command, sys.executable, "-m", "simt_truth.measure", "--run", str(results)],
            capture_output=True,
            text=True,
        )
        if not results.exists():
            sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
        outcome, rows = json.loads(results.read_text()), counters(done.stdout)
    ran = [launch for launch in LAUNCHES if outcome[launch.name][1] or not outcome[launch.name][0]]
    wrong = {name: text for name, (text, _) in outcome.items() if text}
    for name, text in wrong.items():
        print(f"WRONG {name}: {text}")
    if [launch.kernel for launch in ran] != [kernel for kernel, _ in rows]:
        sys.exit(f"{len(ran)} launches ran and ncu saw {len(rows)}: {[k for k, _ in rows][:5]} ...")
    import cupy

    card = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    record = {"card": card, "cuda": cupy.cuda.runtime.runtimeGetVersion(), "launches": {}}
    for launch, (_, counted) in zip(ran, rows):
        if launch.name not in wrong:
            record["launches"][launch.name] = {"crc32": outcome[launch.name][1], "counters": counted}
    Path(target).write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(record['launches'])} launches of {len(LAUNCHES)} measured and right; {len(wrong)} wrong")


if __name__ == "__main__":
    run_all(sys.argv[2]) if sys.argv[1] == "--run" else main(sys.argv[1])
