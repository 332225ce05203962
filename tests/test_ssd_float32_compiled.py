"""float32's own SSD kernels as Triton compiles them for a Hopper card: right on the SIMT machine, without a race, with
no wgmma, and within their registers but for a few bytes. What ptxas made of them with wgmma was wrong on a card at some
sizes, and with numbers that spill by the hundred at others (float32_scores.py)."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("lab.triton_on_simt")
KERNELS = {f"{name}_kernel" for name in ("cumsum", "scores", "state", "passing", "scan")}


@pytest.fixture(scope="module")
def layer():
    """layer(shape, rest, run), in a process of its own; see triton_float32.py"""
    from triton_float32 import layer

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        yield lambda *given: apart.submit(layer, *given).result()


# batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size
@pytest.mark.parametrize("shape", [(1, 140, 2, 64, 1, 128, 128), (2, 70, 1, 32, 1, 48, 64), (1, 20, 1, 16, 1, 16, 16)])
def test_right_and_without_a_race(layer, shape):
    """A race is, too, what one proxy has written and another reads without a fence between the two."""
    y, final, seen = layer(shape, True, True)
    assert seen.keys() == KERNELS and y < 1e-5 and final < 1e-5


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 600, 2, 64, 1, 128, 128), (1, 600, 2, 128, 2, 256, 512), (1, 99, 1, 80, 1, 64, 64)]
)
def test_no_wgmma_and_hardly_a_number_spills(layer, shape, rest):
    seen = layer(shape, rest, False)[2]
    assert seen.keys() == KERNELS and max(stack for _, stack in seen.values()) <= 64
    assert not any("wgmma" in ptx for ptx, _ in seen.values())
    assert all("mma.sync" in seen[f"{name}_kernel"][0] for name in ("scores", "state", "scan"))
