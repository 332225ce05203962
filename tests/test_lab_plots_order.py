"""The pictures of chapter 13: where new values are, and what leads from one block's stores to another's loads."""

import re

import matplotlib
import numpy as np
import pytest

import simt
from lab import plots

matplotlib.use("Agg")


def said(axis):
    return [text.get_text() for text in axis.texts]


CHAIN = """
extern "C" __global__ void chain(float *state, unsigned *counters) {
    __shared__ unsigned chunk;
    if (threadIdx.x == 0) chunk = atomicAdd(counters, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        while (atomicAdd(counters + 1, 0) < chunk) {}
        __threadfence(); // acquire
    }
    __syncthreads(); // barrier after the wait
    state[threadIdx.x] += 1;
    __syncthreads(); // barrier before the flag
    if (threadIdx.x == 0) {
        __threadfence(); // release
        atomicExch(counters + 1, chunk + 1);
    }
}
"""


@pytest.mark.parametrize("missing", [None, *plots.PIECES])
def test_the_picture_says_what_the_machine_says(missing):
    """The first number in a race is that of the first thread without a way from its store to its load."""
    source = CHAIN if missing is None else re.sub(rf".*// {missing}\n", "", CHAIN)
    assert (source == CHAIN) == (missing is None)
    state, counters, seen = np.zeros(64, np.float32), np.zeros(2, np.uint32), plots.sees_new(missing, threads=4)

    def run():
        simt.compile(source)["chain"](3, 64, state, counters, check_races=True)

    if missing is None:
        run()
        assert seen == [0, 1, 2, 3] and (state == 3).all()
        return
    with pytest.raises(simt.RaceError) as race:
        run()
    first = int(re.search(r"race on state\[(\d+)\]", str(race.value))[1])
    assert first == min({0, 1, 2, 3} - set(seen))


@pytest.mark.parametrize("missing, new", [(None, 4), *zip(plots.PIECES, (1, 0, 0, 1))])
def test_a_handover_is_drawn_with_what_is_missing(missing, new):
    (axis,) = plots.handover(missing).axes
    texts = said(axis)
    assert texts.count("load: new") == new and texts.count("load: old?") == 4 - new
    wanted = {None: [], "release": ["no fence"], "acquire": ["no fence"]}.get(missing, [f"no {missing}"])
    assert [text for text in texts if text.startswith("no ")] == wanted
    assert sum(bool(text.arrow_patch) for text in axis.texts if hasattr(text, "arrow_patch")) >= 7


def test_old_values_have_another_colour_than_new_ones():
    picture = plots.old_and_new({"one": {"here": ("new", "new"), "there": ("old, a copy", "new")}, "two": {"x": "ab"}})
    one, two = picture.axes
    assert one.get_title(loc="left") == "one" and two.get_title(loc="left") == "two"
    assert {"here", "there", "state: old, a copy", "flag: new"} <= set(said(one)) and "state: a" in said(two)
    colours = [patch.get_facecolor() for patch in one.patches]
    assert len(set(colours)) == 2 and colours.count(colours[2]) == 1


@pytest.mark.parametrize("segments, chunks, again", [(4, 32, 0.25), (1, 8, 0.5), (3, 30, 1)])
def test_two_passes_take_a_segment_and_its_first_pass(segments, chunks, again):
    (axis,) = plots.two_passes(segments, chunks, again).axes
    whole, *rest = [(bar.get_x(), bar.get_width()) for bar in axis.patches]
    each, first = chunks / segments, again * chunks / segments
    assert whole == (0, chunks) and rest.count((first, each)) == segments
    assert rest.count((0, first)) == segments - 1 and len(rest) == 2 * segments - 1
