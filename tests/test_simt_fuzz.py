"""Random kernels: the SIMT machine gives, bit for bit, what an H200 gave.

After a failure, `cd tests && python -m simt_fuzz.generate SEED` prints the kernel.
"""

import gzip
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from simt_fuzz.generate import generate
from simt_fuzz.measure import WORDS, first_words, record
from simt_truth.measure import checksum

import simt

STORED = json.loads(gzip.decompress((Path(__file__).parent / "simt_fuzz" / "h200.json.gz").read_bytes()))
SEEDS = sorted(map(int, STORED["seeds"]))
BATCHES = [SEEDS[i : i + 25] for i in range(0, len(SEEDS), 25)]


def compiled_together(launches):
    """{seed: (module, name of its kernel)}, of {seed: launch}: one compilation for each set of options.

    Most of the time of a small kernel goes to what the compiler does for every file. Each text stands as it was
    measured, in a namespace of its own, behind the headers of all; only the kernel has another name.
    """
    found = {}
    for options in sorted({launch.options for launch in launches.values()}):
        chosen = {seed: launch.source for seed, launch in launches.items() if launch.options == options}
        headers, texts = set(), []
        for seed, text in chosen.items():
            text, renamed = re.subn(r"(__global__ void\b.*) k\(", rf"\1 k{seed}(", text)
            assert renamed == 1
            headers.update(re.findall(r"^#include .*$", text, flags=re.M))
            texts.append(f"namespace seed_{seed} {{\n{re.sub('(?m)^#include .*$', '', text)}\n}}\n")
        module = simt.compile("\n".join([*sorted(headers), *texts]), options=options)
        found |= {seed: (module, f"k{seed}") for seed in chosen}
    return found


def simulate(launch, module, name):
    """Run on the SIMT machine; return the output arrays."""
    kernel = module[name]
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in launch.args]
    kernel(launch.grid, launch.block, *args, shared=launch.shared)
    return [args[i] for i in launch.outputs]


def difference(outputs, stored):
    """Where the outputs are not the stored ones, in words; None if they are."""
    assert len(outputs) == len(stored["outputs"])
    found = []
    for number, (array, crc, first) in enumerate(zip(outputs, stored["outputs"], stored["first"])):
        if checksum([array]) == crc:
            continue
        have = first_words(array)
        want = np.array([int(first[i : i + 8], 16) for i in range(0, len(first), 8)], np.uint32)
        at = np.flatnonzero(have != want)[:5]
        words = ", ".join(f"word {i} is {have[i]:08x}, not {want[i]:08x}" for i in at)
        found.append(f"output {number}: {words or f'differs after its first {WORDS} words'}")
    return "; ".join(found) or None


def test_enough_kernels_were_measured():
    assert len(SEEDS) >= 500 and STORED["card"] == "NVIDIA H200"


@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"{seeds[0]}_to_{seeds[-1]}")
def test_the_machine_gives_the_gpus_bits(seeds):
    wrong, launches = [], {seed: generate(seed) for seed in seeds}
    for seed, launch in launches.items():
        measured = STORED["seeds"][str(seed)]["source"]
        assert zlib.crc32(launch.source.encode()) == measured, f"seed {seed}: another kernel than was measured"
    kernels = compiled_together(launches)
    for seed, launch in launches.items():
        try:
            said = difference(simulate(launch, *kernels[seed]), STORED["seeds"][str(seed)])
        except Exception as error:  # name the seed, and go on with the others
            said = f"{type(error).__name__}: {str(error)[:300]}"
        if said:
            wrong.append(f"seed {seed}: {said}")
    assert not wrong, f"{len(wrong)} of {len(seeds)}; python -m simt_fuzz.generate SEED\n" + "\n".join(wrong)


def test_a_seed_gives_the_same_kernel_again():
    for seed in SEEDS[:5]:
        one, two = generate(seed), generate(seed)
        assert (one.source, one.grid, one.block, one.options) == (two.source, two.grid, two.block, two.options)
        assert all(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f") for a, b in zip(one.args, two.args))
    assert len({generate(seed).source for seed in SEEDS[:50]}) == 50


def test_a_wrong_word_is_found():
    launch = generate(SEEDS[0])
    outputs = [launch.args[i].copy() for i in launch.outputs]
    stored = record(SEEDS[0], outputs)
    assert difference(outputs, stored) is None
    outputs[-1][3] ^= 1
    assert "word 3 is" in difference(outputs, stored)
    outputs[-1][3] ^= 1
    outputs[-1][-1] ^= 1 << 31
    assert "differs after" in difference(outputs, stored)
