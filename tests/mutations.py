"""Planted mistakes, each of which a test on a CPU must see: python -m tests.mutations, or make mutations.

Each mutation is one change of one file, and the tests that must fail with it. A copy of the checkout is made; the tests
pass there first, and then must fail with each change in turn, which is taken back. Nothing here is changed.

    python -m tests.mutations            all of them, some minutes
    python -m tests.mutations PDL ring   those with one of these words in their names or files
    python -m tests.mutations --list     their names

It ends with 1 if a mutation goes unseen, if its text is no longer to be found, or if its tests fail without it. Bugs
that a test has once missed belong in this list; tests/test_mutations.py sees that each still has its place.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".build", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis",
    ".ipynb_checkpoints", "measured",
)  # fmt: skip
PATIENCE = 600  # seconds for the tests of one mutation
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in the file, becomes `new`; `tests` are what pytest is given, and must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def without(name, file, old, tests, new=""):
    return Mutation(name, file, old, new, tests)


MUTATIONS = [
    # Programmatic dependent launch: a wait that is missing, or comes late.
    without(
        "PDL: gemv does not wait",
        "kernels/gemv/gemv.cu",
        "if (begin == 0) WAIT_FOR_THE_LAST_KERNEL();",
        "tests/test_gemv.py -k test_pdl_gives_the_same",
    ),
    without(
        "PDL: gemv reads x before it waits",
        "kernels/gemv/gemv.cu",
        "if (begin == 0) WAIT_FOR_THE_LAST_KERNEL();",
        "tests/test_gemv.py -k test_pdl_gives_the_same",
        "if (begin > 0) WAIT_FOR_THE_LAST_KERNEL();",
    ),
    without(
        "PDL: the ring does not wait",
        "kernels/gemv/ring.cu",
        WAIT,
        "tests/test_gemv.py -k 'test_the_ring_is_right and 1057'",
    ),
    without(
        "PDL: rmsnorm does not wait",
        "kernels/fusion/rmsnorm.cu",
        " griddepcontrol.wait;",
        "tests/test_fusion.py -k test_the_pieces",
    ),
    without(
        "PDL: add and silu_mul do not wait",
        "kernels/fusion/elementwise.cu",
        " griddepcontrol.wait;",
        "tests/test_fusion.py -k test_the_pieces",
    ),
    without(
        "PDL: gemv_residual does not wait",
        "kernels/fusion/gemv_residual.cu",
        "    wait_for_the_kernel_before(); // 2\n",
        "tests/test_fusion.py -k test_gemv_residual",
    ),
    without(
        "PDL: gemv_residual_any does not wait",
        "kernels/fusion/gemv_residual.cu",
        "    wait_for_the_kernel_before();\n",
        "tests/test_fusion.py -k test_gemv_residual",
    ),
    without(
        "PDL: norm_qkv does not wait",
        "kernels/fusion/norm_qkv.cu",
        "    wait_for_the_kernel_before(); // 2\n",
        "tests/test_fusion.py -k test_norm_qkv",
    ),
    without(
        "PDL: norm_qkv_any does not wait",
        "kernels/fusion/norm_qkv.cu",
        "    wait_for_the_kernel_before();\n",
        "tests/test_fusion.py -k test_norm_qkv",
    ),
    without(
        "PDL: norm_glu does not wait",
        "kernels/fusion/norm_glu.cu",
        "    wait_for_the_kernel_before(); // 2\n",
        "tests/test_fusion.py -k test_norm_glu",
    ),
    without(
        "PDL: norm_glu_any does not wait",
        "kernels/fusion/norm_glu.cu",
        "    wait_for_the_kernel_before();\n",
        "tests/test_fusion.py -k test_norm_glu",
    ),
    without(
        "PDL: norm_glu reads x before it waits",
        "kernels/fusion/norm_glu.cu",
        "    wait_for_the_kernel_before(); // 2\n    piece.load(x, cols);          // 3\n",
        "tests/test_fusion.py -k test_norm_glu",
        "    piece.load(x, cols);\n    wait_for_the_kernel_before();\n",
    ),
    without(
        "PDL: the layer in one launch does not wait",
        "kernels/fusion/layer.cu",
        "    wait_for_the_kernel_before();\n",
        "tests/test_fusion.py -k 'test_the_layer_in_all_its_steps and 64-16'",
    ),
    without(
        "PDL: lowbit does not wait",
        "kernels/lowbit/gemv.cu",
        f"    // 2. wait for the kernel ahead\n#if __CUDA_ARCH__ >= 900\n    {WAIT}\n",
        "tests/test_lowbit.py -k 'test_right_on_hostile_shapes and 13-2080'",
        "#if __CUDA_ARCH__ >= 900\n",
    ),
    without(
        "PDL: lowbit's merge does not wait",
        "kernels/lowbit/gemv.cu",
        f'    asm volatile("griddepcontrol.launch_dependents;");\n    {WAIT}\n',
        "tests/test_lowbit.py -k test_sums_of_splits_of_any_number_go_anywhere",
        '    asm volatile("griddepcontrol.launch_dependents;");\n',
    ),
    without(
        "PDL: attention does not wait for q",
        "kernels/attention/decode.cu",
        "            wait_for_the_kernel_before();\n            waited = true;\n",
        "tests/test_attention_decode.py -k test_the_same_bits_again_and_with_pdl",
        "            waited = true;\n",
    ),
    without(
        "PDL: attention reads the newest token early",
        "kernels/attention/decode.cu",
        " || next.tile + 1 == next.tiles",
        "tests/test_attention_decode.py -k test_the_same_bits_again_and_with_pdl",
    ),
    without(
        "PDL: attention's blocks without work do not wait",
        "kernels/attention/decode.cu",
        "        wait_for_the_kernel_before(); // who waits for this kernel takes the one before as done, too\n",
        "tests/test_attention_decode.py -k test_blocks_without_work_wait_too",
    ),
    without(
        "PDL: attention's merge does not wait",
        "kernels/attention/merge.cu",
        "    wait_for_the_kernel_before();\n",
        "tests/test_attention_decode.py -k test_the_same_bits_again_and_with_pdl",
    ),
    without(
        "PDL: kv_cache does not wait for q",
        "kernels/kv_cache/decode.cu",
        "            wait_for_the_kernel_before();\n            waited = true;\n",
        "tests/test_kv_cache.py -k test_lengths_of_their_own",
        "            waited = true;\n",
    ),
    without(
        "PDL: kv_cache reads the newest group early",
        "kernels/kv_cache/decode.cu",
        "step >= 0 || (next.mine > 0 && next.place.tile * TILE >=\n"
        "                                                           (line.length(next.place.b) - 1) / LATE * LATE)",
        "tests/test_kv_cache.py -k test_lengths_of_their_own",
        "step >= 0",
    ),
    without(
        "PDL: kv_cache takes a tile for the newest group",
        "kernels/kv_cache/decode.cu",
        "(line.length(next.place.b) - 1) / LATE * LATE",
        "tests/test_kv_cache.py -k test_the_ring_goes_round",
        "(line.length(next.place.b) - 1) / TILE * TILE",
    ),
    without(
        "PDL: kv_cache's blocks without work do not wait",
        "kernels/kv_cache/decode.cu",
        "        wait_for_the_kernel_before(); // who waits for this kernel takes the one before as done, too\n",
        "tests/test_kv_cache.py -k test_blocks_without_work_wait_too",
    ),
    # Rings: who still reads a slot when it is filled again.
    without(
        "ring: attention fills a slot that lanes still read",
        "kernels/attention/decode.cu",
        "            mine += SLICES;\n            __syncwarp();\n",
        "tests/test_attention_decode.py -k test_no_race",
        "            mine += SLICES;\n",
    ),
    without(
        "ring: kv_cache fills a slot that lanes still read",
        "kernels/kv_cache/decode.cu",
        "            here.mine--, here.place.tile++;\n            __syncwarp();\n",
        "tests/test_kv_cache.py -k test_no_race_and_every_byte_once",
        "            here.mine--, here.place.tile++;\n",
    ),
]


def chosen(words):
    """The mutations with one of the words in their names or files; all without words."""
    return [m for m in MUTATIONS if not words or any(w.lower() in f"{m.name} {m.file}".lower() for w in words)]


def run(checkout, tests):
    """Run pytest with a selection. Returns (number that passed, names and words of those that failed, other trouble)."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *split(tests)]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return 0, [], f"no verdict in {PATIENCE} s"
    failed = re.findall(r"^FAILED (.*)$", done.stdout, re.M)
    passed = re.search(r"(\d+) passed", done.stdout)
    trouble = "" if done.returncode in (0, 1) else (done.stdout + done.stderr).strip().splitlines()[-1]
    return int(passed[1]) if passed else 0, failed, trouble


def split(tests):
    """'a.py -k "b and c"' -> its words."""
    import shlex

    return shlex.split(tests)


def see(checkout, mutation, sound):
    """(is the mutation seen, what was seen) in a copy of the checkout. sound: what is known of tests without it."""
    if mutation.tests not in sound:
        passed, failed, trouble = run(checkout, mutation.tests)
        sound[mutation.tests] = trouble or (f"fails without it: {failed[0]}" if failed else "") or (
            "" if passed else "no test runs"
        )  # fmt: skip
    if sound[mutation.tests]:
        return False, f"{mutation.tests}: {sound[mutation.tests]}"
    path = checkout / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return False, f"its text stands {text.count(mutation.old)} times in {mutation.file}, not once"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        _, failed, trouble = run(checkout, mutation.tests)
    finally:
        path.write_text(text)
    if failed:
        return True, failed[0]
    return False, trouble or f"goes unseen by {mutation.tests}"


def main(words):
    found = chosen([w for w in words if w != "--list"])
    if "--list" in words or not found:
        print("\n".join(m.name for m in found) or f"no mutation has {' or '.join(words)} in its name or file")
        return 0 if found else 1
    unseen, sound = 0, {}
    width = max(len(m.name) for m in found)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=LEFT_OUT, symlinks=True)
        for mutation in found:
            begin = time.monotonic()
            seen, what = see(checkout, mutation, sound)
            unseen += not seen
            print(
                f"{'seen  ' if seen else 'UNSEEN'}  {mutation.name:{width}}  {time.monotonic() - begin:4.0f} s  {what}",
                flush=True,
            )
    print(f"{len(found) - unseen} of {len(found)} are seen")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
