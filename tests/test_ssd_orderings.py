"""Chapter 13's rungs in Triton, as Triton compiles them for a card, on the SIMT machine: every ordering between blocks
is needed, and the lack of each is found. (fused.cu's are among the planted mistakes of tests/mutations.py.)"""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import simt

triton_on_simt = pytest.importorskip("lab.triton_on_simt")
ORDERED = re.compile(r"(?:atom|ld|st)\.global\.gpu\.(release|acquire|acq_rel)")
WEAKER = {"release": ["relaxed"], "acquire": ["relaxed"], "acq_rel": ["release", "acquire"]}


@pytest.fixture(scope="module")
def apart():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("rung", ["published", "segments"])
def test_each_ordering_is_needed_and_its_lack_is_found(apart, rung):
    from triton_orderings import compiled

    ptx, shared, threads, blocks, given, y, wanted, allowed = apart.submit(compiled, rung).result()

    def run(text, order="forward"):
        args = [a.copy() if isinstance(a, np.ndarray) else a for a in given]
        args[y][...] = np.inf
        triton_on_simt.launch(text, blocks, threads, args, shared, check_races=True, order=order)
        off, lost = np.abs(args[y].astype(float) - wanted), np.isnan(wanted)
        assert np.array_equal(np.isnan(args[y]), lost) and (off <= allowed)[~lost].all()

    run(ptx)
    run(ptx, order="reverse")
    found = list(ORDERED.finditer(ptx))
    assert {f[1] for f in found} >= {"release", "acquire"}
    for f in found:
        start, end = f.span(1)
        spoilt = [ptx[:start] + weaker + ptx[end:] for weaker in WEAKER[f[1]]]
        if f[1] != "acquire":  # the barrier before a release
            spoilt.append(without_line(ptx, ptx.rindex("bar.sync", 0, start)))
        if f[1] != "release":  # ... and behind an acquire
            spoilt.append(without_line(ptx, ptx.index("bar.sync", end)))
        for text in spoilt:
            with pytest.raises(simt.RaceError):
                run(text)


def without_line(text, at):
    return text[:at] + text[text.index("\n", at) :]
