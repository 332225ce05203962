"""The pictures of latent attention: what is drawn is what the kernel does."""

import pytest

from lab import plots
from lab.plots import latent


@pytest.mark.parametrize("softmax", [0.5, 2.0, 7.0])
@pytest.mark.parametrize("tiles", [1, 2, 3, 6, 9])
def test_each_tile_is_multiplied_once_by_each_half_and_in_an_order_that_can_be(tiles, softmax):
    schedule = latent.turns_schedule(tiles, softmax)
    at = {(what, says): (begins, ends) for _, what, begins, ends, says in schedule}
    assert len(at) == len(schedule) == 5 * tiles
    for t in range(tiles):
        scores, weights = at[latent.SCORES, f"S{t}b"], at[latent.SOFTMAX, f"W{t}"]
        assert at[latent.SCORES, f"S{t}a"][1] <= scores[0] and scores[1] <= weights[0]
        assert all(weights[1] <= at[half, f"V{t}"][0] for half in (latent.OWN, latent.OTHERS))
    for band in range(3):  # nothing overlaps
        spans = sorted((begins, ends) for one, _, begins, ends, _ in schedule if one == band)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))


def test_the_title_says_how_long_tensor_cores_multiply_and_a_longer_softmax_makes_them_wait():
    shares = []
    for softmax in (0.5, 1.5, 4.0):
        end = max(step[3] for step in latent.turns_schedule(8, softmax))
        shares.append(8 * (2.25 + 2) / end)
        assert f"{shares[-1]:.0%}" in plots.latent_turns(8, softmax).axes[0].get_title(loc="left")
    assert 1 > shares[0] > shares[1] > 0.9 > 0.8 > shares[2]


def test_all_parts_of_queries_and_tiles_are_there():
    said = [text.get_text() for text in plots.latent_tile().axes[0].texts]
    assert all(said.count(f"part {part}") == 3 for part in range(9))
    assert {"0", "512", "576"} <= set(said)


def test_only_the_models_form_makes_something_for_each_token():
    hatched = [sum(bool(box.get_hatch()) for box in axis.patches) for axis in plots.latent_forms().axes]
    assert hatched == [2, 0]
    assert len(plots.sums_at_home().axes) == 2
