"""The pictures of chapter 15: decays as row × column, roles over time, the walk of shares."""

import matplotlib
import numpy as np
import pytest

from lab import plots
from lab.plots import fused

matplotlib.use("Agg")


def said(axis):
    return [text.get_text() for text in axis.texts]


def test_factors_make_the_decays():
    log2 = -np.random.default_rng(15).uniform(0, 3, 64)
    whole, row, column, between = fused.decay_factors(log2)
    i, j = np.tril_indices(64, -1)
    wanted = np.array([2 ** log2[b + 1 : a + 1].sum() for a, b in zip(i, j)])
    assert np.allclose(whole[i, j], wanted) and np.isnan(whole[np.triu_indices(64, 1)]).all()
    apart = i // 16 > j // 16
    i, j = i[apart], j[apart]
    assert np.allclose(row[i] * between[i // 16, j // 16] * column[j], whole[i, j])
    (axis, _) = plots.block_decays(log2, at=(40, 3)).axes
    assert any(text.startswith("i = 40, j = 3:") for text in said(axis))


@pytest.mark.parametrize("places, pass_1", [(1, 0), (2, 1), (3, 2)])
def test_roles_wait_for_what_they_must(places, pass_1):
    found = fused.role_steps(places, 7, pass_1)
    ends = {}
    for role, step, asks, begins, end in found:
        assert asks <= begins < end
        if role in ("bring_tiles", "make_decays") and step >= places:
            before = "multiply" if step - places < pass_1 else "store_tiles"
            assert begins >= ends[before, step - places]
        if role in ("make_scores", "multiply"):
            assert begins >= max(ends["bring_tiles", step], ends["make_decays", step])
        if role == "store_tiles":
            assert begins >= ends["multiply", step]
        ends[role, step] = end
    assert {step for role, step in ends if role == "make_scores"} == set(range(pass_1, 7))
    (axis,) = plots.role_picture(places, 7, pass_1).axes
    assert len(said(axis)) == len(found)


def test_more_places_are_never_slower():
    ends = [max(end for *_, end in fused.role_steps(places)) for places in (1, 2, 3, 4)]
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[2]


def test_shares_are_walked_last_piece_first():
    shares = [[(0, 0, 9)], [(0, 9, 12), (1, 0, 7)], [(1, 7, 12), (2, 0, 12)]]
    steps = fused.share_steps(shares, 12, pass_1=0.5)
    assert [(share, what, piece) for share, what, piece, _, _ in steps if share == 1] == [
        (1, "pass 1", (1, 0, 7)),
        (1, "pass 2", (1, 0, 7)),
        (1, "pass 2", (0, 9, 12)),
    ]
    assert [(share, what) for share, what, *_ in steps if share == 2] == [(2, "pass 2")] * 2  # its last ends a pair
    published = {piece: end for _, what, piece, _, end in steps if what == "pass 1"}
    assert published == {(0, 0, 9): 4.5, (1, 0, 7): 3.5}
    (alone,) = [step for step in fused.share_steps([[(0, 0, 2)], [(0, 2, 4)]], 4, 1.0) if step[1] == "wait"]
    assert alone == (1, "wait", (0, 2, 4), 0.0, 2.0)
    line, walk = plots.share_walk(shares, 12).axes
    assert said(line) == ["share 0", "share 1", "share 1", "share 2", "share 2"]
    assert "8…0" in said(walk) and "0…8" in said(walk)
