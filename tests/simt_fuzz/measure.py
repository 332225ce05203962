"""Run the kernels of the first seeds on an NVIDIA GPU and write what they gave to h200.json.gz.

    cd tests && python -m simt_fuzz.measure h200.json.gz [seeds]        (needs a GPU, NVRTC, cupy)
    cd tests && python -m simt_fuzz.measure --compile folder [seeds]    compile only: no GPU needed
    cd tests && python -m simt_fuzz.measure --run folder [seeds]        run what was compiled: for compute-sanitizer

Every kernel is compiled with NVRTC to machine code and run twice: once as it is, and once compiled without
optimisation (-G). Undefined behaviour and races tend to show as a difference. A seed whose runs differ is named and
left out.
"""

import gzip
import json
import multiprocessing
import re
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from simt_truth.measure import checksum

from simt_fuzz.generate import generate

SEEDS = 540
WORDS = 48  # words of each output that are kept to look at


def include_folders():
    """Where cuda_fp16.h is."""
    import nvidia

    folders = [Path(p) / "cu13" / "include" for p in nvidia.__path__] + [Path("/usr/local/cuda/include")]
    found = [f for f in folders if (f / "cuda_fp16.h").exists()]
    if not found:
        sys.exit(
            "cuda_fp16.h: expected in the wheel nvidia-cuda-runtime or in /usr/local/cuda/include, found in neither"
        )
    return [found[0], found[0] / "cccl"]


def compile_source(source, options, to):
    """NVRTC: source -> (machine code or PTX, log). `to` is sm_90 or compute_90."""
    from cuda.bindings import nvrtc

    def text(size, fetch):
        buffer = b" " * size(program)[1]
        fetch(program, buffer)
        return buffer

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", 0, [], [])
    options = [f"-arch={to}", *options, *(f"-I{folder}" for folder in include_folders())]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().strip("\0 \n")
    if int(status):
        return None, log
    if to.startswith("sm"):
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log


def compile_seed(job):
    seed, folder, more = job
    launch = generate(seed)
    code, log = compile_source(launch.source, (*launch.options, *more), "sm_90")
    if code is None and "-G" in more:  # it does not compile __dp4a
        code, log = compile_source(launch.source, launch.options, "sm_90")
    if code is not None:
        (Path(folder) / f"{seed}.cubin").write_bytes(code)
    return seed, log


def contracts_late(launch):
    """True where PTX holds a product that ptxas may join to a sum: then PTX does not settle the result."""
    ptx = b"" if launch.options else compile_source(launch.source, launch.options, "compute_90")[0]
    return re.search(rb"\bmul\.f(32|64)\b", ptx) is not None


def compile_all(folder, seeds, more=()):
    """Compile every seed's kernel into the folder, on all cores, with more options; say what the compiler says."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        for seed, log in pool.imap(compile_seed, [(seed, folder, more) for seed in range(seeds)], chunksize=8):
            if log:
                print(f"seed {seed}: {log[:500]}")


def run(launch, cubin):
    """Launch on the GPU; return the output arrays."""
    import cupy

    kernel = cupy.RawModule(path=str(cubin)).get_function(launch.kernel)
    buffers = [cupy.asarray(a.view(np.uint8)) if isinstance(a, np.ndarray) else a for a in launch.args]
    as3 = [tuple(np.atleast_1d(size).tolist()) for size in (launch.grid, launch.block)]
    kernel(*as3, tuple(buffers), shared_mem=launch.shared)
    cupy.cuda.runtime.deviceSynchronize()
    return [buffers[i].get().view(launch.args[i].dtype) for i in launch.outputs]


def run_all(folder, seeds, trace=False):
    """{seed: output arrays} of every seed that was compiled."""
    found = {}
    for seed in range(seeds):
        cubin = Path(folder) / f"{seed}.cubin"
        if cubin.exists():
            if trace:
                print("seed", seed, flush=True)
            found[seed] = run(generate(seed), cubin)
    print(f"{len(found)} kernels ran")
    return found


def first_words(array):
    return np.frombuffer(array.tobytes()[: 4 * WORDS].ljust(-(-min(array.nbytes, 4 * WORDS) // 4) * 4, b"\0"), "<u4")


def differing(outputs, others):
    """The first words of each output that are not the other's, as text."""
    found = []
    for number, (one, two) in enumerate(zip(outputs, others)):
        at = np.flatnonzero(one != two)
        found += [f"output {number}, {len(at)} elements, {i}: {one[i]} and {two[i]}" for i in at[:3]]
    return "; ".join(found)


def record(seed, outputs):
    """What is stored of one seed: checksums of the source and of each output, and the outputs' first words."""
    return {
        "source": zlib.crc32(generate(seed).source.encode()),
        "outputs": [checksum([array]) for array in outputs],
        "first": ["".join(f"{word:08x}" for word in first_words(array)) for array in outputs],
    }


def main(target, seeds):
    import cupy

    runs = []
    for more in (), ("-G",):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            compile_all(folder, seeds, more)
            compiled = time.perf_counter()
            runs.append(run_all(folder, seeds))
        print(f"compiled in {compiled - start:.0f} s, ran in {time.perf_counter() - compiled:.0f} s")
    kept = {}
    for seed, outputs in runs[0].items():
        launch = generate(seed)
        again = runs[1].get(seed, []) if launch.options else outputs  # FMAs are made by the optimiser
        if [checksum([a]) for a in outputs] != [checksum([a]) for a in again]:
            print(f"DROPPED seed {seed}: it gives something else without optimisation: {differing(outputs, again)}")
        elif contracts_late(launch):
            print(f"DROPPED seed {seed}: a product in its PTX may still be contracted")
        else:
            kept[seed] = record(seed, outputs)
    card = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    text = json.dumps(
        {"card": card, "cuda": cupy.cuda.runtime.runtimeGetVersion(), "seeds": kept}, separators=(",", ":")
    )
    Path(target).write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(kept)} seeds of {seeds} stored")


if __name__ == "__main__":
    count = int(sys.argv[-1]) if sys.argv[-1].isdigit() else SEEDS
    if sys.argv[1] == "--compile":
        compile_all(sys.argv[2], count)
    elif sys.argv[1] == "--run":
        run_all(sys.argv[2], count, trace=True)
    else:
        main(sys.argv[1], count)
