"""Who may come to a barrier, and whom lanes may name: small kernels, right and wrong, for an H200's synccheck.

    PYTHONPATH=tests python -m simt_truth.synccheck tests/simt_truth/h200_synccheck.json     (needs compute-sanitizer)
    PYTHONPATH=tests python -m simt_truth.synccheck tests/simt_truth/h200_synccheck.json -k early     (some by name)

Each kernel runs twice in a process of its own: alone, and under compute-sanitizer's synccheck. One that hangs is ended.
Stored are what synccheck said, whether the kernel ended, and what it wrote where it ran alone. What is stored for other
kernels stays.
"""

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ASIDE = re.compile("COMPUTE-SANITIZER|ERROR SUMMARY|LEAK SUMMARY|Target application|Error: process|Program hit|Saved")
PATIENCE = 12  # seconds until a kernel is said to hang
BLOCKS, THREADS, WORDS, N = 2, 64, 256, 20
HEAD = (
    'extern "C" __global__ void {}(volatile int* y, int n) {{\n'
    "__shared__ volatile int s[64]; int t = threadIdx.x; y += 128 * blockIdx.x;"
)

# name: (what follows HEAD, what the SIMT machine makes of it: None if it is legal, else the name of an error).
# y has 128 elements of 0 for each block; n is 20.
KERNELS = {
    # Barriers that all threads come to which have not left.
    "all_take_the_if": ("if (n > 3) __syncthreads(); y[t] = 1;", None),
    "blocks_take_the_if": ("if (blockIdx.x) { y[t] = 4; __syncthreads(); } y[t] = 1;", None),
    "early_return_of_a_part": ("if (t >= 40) return; __syncthreads(); y[t] = 1;", None),
    "early_return_of_a_warp": ("if (t >= 32) return; __syncthreads(); y[t] = 1;", None),
    "early_return_that_stores": ("if (t >= 40) { y[t] = 1; return; } __syncthreads(); y[t] = 2;", None),
    "early_return_in_a_loop": (
        "for (int r = 0; r < 8; r++) { __syncthreads(); y[t] = r; if (r * 9 > t) return; y[t] = 5; }", None),
    "a_warp_the_other_leaves": ("if (t < 32) { __syncthreads(); y[t] = 1; }", None),
    "a_warp_the_other_works_and_leaves": ("if (t < 32) __syncthreads(); y[t] = 1;", None),
    "a_part_the_others_just_leave": ("if (t < 16) { __syncthreads(); y[t] = 1; }", None),
    "a_switch_that_all_take": (
        "switch (n) { case 20: __syncthreads(); y[t] = 2; break; default: __syncthreads(); } y[t]++;", None),
    "loops_that_last_differently": (
        "for (int r = 0; r < 3; r++) { __syncthreads(); int i = t; do y[t] += i, i += 7; while (i < 50);"
        " if (n > 5) __syncthreads(); i = t; do y[t] += i, i += 5; while (i < 50); }", None),
    "in_one_round": ("for (int r = 0; r < 8; r++) { if (r == 3) __syncthreads(); if (t & r) y[t] = 1; s[t] = r; }",
                     None),
    # Those that some leave out.
    "a_part_of_a_warp": ("s[t] = t; if (t < 16) __syncthreads(); y[t] = s[t ^ 1];", "BarrierFault"),
    "a_part_that_counts": ("if (t < 16) y[t] = __syncthreads_count(1); s[t] = 3; y[t] += s[t];", "BarrierFault"),
    "a_part_in_a_loop": ("for (int i = 0; i < 3; i++) { if (t < 16) __syncthreads(); s[t] = i; }", "BarrierFault"),
    "a_part_and_a_shuffle": ("if (t < 16) __syncthreads(); y[t] = __shfl_xor_sync(~0u, t, 1);", "BarrierFault"),
    "an_if_in_an_if": ("if (n > 3) { if (t < 16) __syncthreads(); y[t] = 2; } y[t] += 5;", "BarrierFault"),
    "rounds_that_differ": ("for (int i = t; i < 99; i += 33) { y[i] = 3; __syncthreads(); } s[t] = 1;", "BarrierFault"),
    "some_leave_the_loop": (
        "s[t] = t; for (int i = 0; i < 9; i++) { if (s[i] == t) break; __syncthreads(); } y[t] = 1;", "BarrierFault"),
    "two_places_in_a_warp": (
        "if (t < 16) { y[t] = 1; __syncthreads(); y[t] += 2; } else { s[t] = 2; __syncthreads(); y[t] = s[t]; }",
        "BarrierFault"),
    "two_places_by_warps": (
        "if (t < 32) { y[t] = 1; __syncthreads(); y[t] += 2; } else { s[t] = 2; __syncthreads(); y[t] = s[t]; }",
        "BarrierFault"),
    "a_warp_the_other_at_the_next": (
        "if (t < 32) { __syncthreads(); y[t] = 4; } s[t] = 1; __syncthreads(); y[t] = 2;", "BarrierFault"),
    # Barriers for some of the block.
    "numbered_whole_warps": ('if (t < 32) { asm volatile("bar.sync 1, 32;"); y[t] = 1; } y[t] = 2;', None),
    "numbered_a_part": ('if (t % 32 < 16) { asm volatile("bar.sync 1, 32;"); y[t] = 1; } y[t] += 1;', "BarrierFault"),
    "numbered_two_in_a_warp": (
        'if (t < 16) { asm volatile("bar.sync 1, 32;"); y[t] = 1; } else asm volatile("bar.sync 2, 64;"); s[t] = 1;',
        "BarrierFault"),
    "not_aligned_a_part": ('if (t % 32 < 16) { asm volatile("barrier.sync 1, 32;"); y[t] = 1; } y[t] += 1;', None),
    "not_aligned_two_places": (
        'if (t < 16) { s[t] = 1; asm volatile("barrier.sync 0;"); } else asm volatile("barrier.sync 0;"); y[t] = 2;',
        None),
    # Lanes together.
    "syncwarp_names_who_has_left": ("if (t % 32 >= 20) return; __syncwarp(); y[t] = 1;", None),
    "syncwarp_in_both_arms": (
        "if (t & 1) { y[t] = 1; __syncwarp(); s[t] = 1; } else { __syncwarp(); y[t] = 2; }", None),
    "syncwarp_that_others_leave_out": ("if (t % 32 < 16) __syncwarp(); y[t] = 1;", None),
    "vote_names_who_has_left": ("if (t % 32 >= 20) return; y[t] = __ballot_sync(~0u, t & 1);", None),
    "reduction_names_who_has_left": ("if (t % 32 >= 20) return; y[t] = __reduce_add_sync(~0u, t);", None),
    "match_names_who_has_left": ("if (t % 32 >= 20) return; y[t] = __match_any_sync(~0u, t / 4);", None),
    "shuffle_names_who_has_left": ("if (t % 32 >= 20) return; y[t] = __shfl_sync(~0u, t, 3);", None),
    "shuffle_reads_who_has_left": ("if (t % 32 >= 20) return; y[t] = __shfl_down_sync(~0u, t + 1, 1);", "LaneFault"),
    "shuffle_reads_who_is_not_named": (
        "if (t % 32 < 16) y[t] = __shfl_xor_sync(0xffff, t + 1, 16); else s[t] = 1;", "LaneFault"),
    "shuffle_up_to_the_segments_end": ("y[t] = __shfl_down_sync(~0u, t, 1, 8);", None),
    "shuffle_by_who_is_not_named": ("y[t] = __shfl_xor_sync(0x7fffffff, t, 1);", "LaneFault"),
}  # fmt: skip


def source():
    """All kernels as one text."""
    return "".join(f"{HEAD.format(name)}\n{body}\n}}\n" for name, (body, _) in KERNELS.items())


# On a card.


def launch(cubin, name):
    """Run one kernel by the driver alone, as little as a process can do; print what it wrote."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        sys.exit(str(error))

    def call(function, *args):
        status = getattr(cuda, function)(*args)
        if status:
            sys.exit(f"{function}: error {status}")

    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    y, n, size = ctypes.c_uint64(), ctypes.c_int(N), ctypes.c_size_t(4 * WORDS)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    text = ctypes.create_string_buffer(100)
    call("cuDeviceGetName", text, 100, device)
    print("card", text.value.decode(), flush=True)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), Path(cubin).read_bytes())
    call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
    call("cuMemAlloc_v2", ctypes.byref(y), size)
    call("cuMemsetD32_v2", y, 0, ctypes.c_size_t(WORDS))
    given = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in (y, n)))
    call("cuLaunchKernel", kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, None, given, None)
    call("cuCtxSynchronize")
    out = (ctypes.c_int * WORDS)()
    call("cuMemcpyDtoH_v2", out, y, size)
    print("wrote", json.dumps(list(out)))


def run(command):
    """(what it printed, whether it ended in time)"""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as late:
        return "".join(t.decode() if isinstance(t, bytes) else t or "" for t in (late.stdout, late.stderr)), False
    return done.stdout + done.stderr, True


def measure(cubin, name, sanitizer):
    """What a card and synccheck make of one kernel."""
    plain = [sys.executable, __file__, "--launch", str(cubin), name]
    alone, ended = run(plain)
    checked, ended_checked = run([sanitizer, "--tool", "synccheck", "--print-limit", "100", *plain])
    wrote = re.search(r"^wrote (.*)$", alone, re.M)
    said = re.findall(r"^=+ (\S.*)$", checked, re.M)  # what is indented further says where
    said = {text.removeprefix("Barrier error detected. ").rstrip(".") for text in said if not ASIDE.match(text)}
    failed = re.search(r"^cu\w+: error \d+$", alone, re.M)
    return {
        "card": (re.findall(r"^card (.*)$", alone, re.M) or [None])[0],
        "ended": ended,
        "wrote": json.loads(wrote[1]) if wrote else None,
        "failed": failed[0] if failed else None,
        "synccheck": sorted(said),
        "ended under synccheck": ended_checked,
        "summary": (re.findall(r"ERROR SUMMARY: (.*)", checked) or [None])[-1],
    }


def build(folder):
    """The kernels' machine code in a file: by NVRTC, or else by nvcc."""
    cubin, text = Path(folder) / "kernels.cubin", Path(folder) / "kernels.cu"
    text.write_text(source())
    try:
        from simt import nvrtc

        cubin.write_bytes(nvrtc.compile_to_cubin(source(), arch="sm_90"))
    except Exception as error:
        print(f"NVRTC: {error}; nvcc is tried")
        subprocess.run(["nvcc", "-cubin", "-arch=sm_90", "-lineinfo", "-o", str(cubin), str(text)], check=True)
    return cubin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("-k", default="", help="only kernels whose name holds this")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    options = parser.parse_args()
    names = [name for name in KERNELS if options.k in name]
    with tempfile.TemporaryDirectory() as folder:
        cubin = build(folder)
        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(names, pool.map(lambda name: measure(cubin, name, options.sanitizer), names), strict=True))
    card = next(filter(None, [one.pop("card") for one in found.values()]), None)
    if card is None:
        sys.exit("no kernel has run: this needs a card and its driver")
    version = re.search(r"Version ([\w.]+)", run([options.sanitizer, "--version"])[0])
    stored = json.loads(options.target.read_text()) if options.target.exists() else {"kernels": {}}
    kernels = {name: (stored["kernels"] | found)[name] for name in KERNELS if name in stored["kernels"] | found}
    record = {"card": card, "compute-sanitizer": version[1] if version else None, "kernels": kernels}
    options.target.write_text(json.dumps(record, indent=1) + "\n")
    for name, one in found.items():
        print(f"{name:36} machine: {KERNELS[name][1] or 'legal':13} {'ends' if one['ended'] else 'HANGS':6} "
              f"synccheck: {'; '.join(one['synccheck']) or one['summary']}")  # fmt: skip


if __name__ == "__main__":
    launch(*sys.argv[2:]) if sys.argv[1:2] == ["--launch"] else main()
