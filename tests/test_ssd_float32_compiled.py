"""float32's own SSD kernels as Triton compiles them for a Hopper card: right on the SIMT machine, without a race, and
within their registers. What ptxas makes of a kernel whose numbers spill by the hundred was wrong on a card."""

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
    assert all("wgmma.mma_async" in seen[f"{name}_kernel"][0] for name in ("state", "scan")) == (shape[3] == 64)


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("shape", [(1, 600, 2, 64, 1, 128, 128), (1, 600, 2, 128, 2, 256, 256)])
def test_nothing_spills(layer, shape, rest):
    assert {name: stack for name, (_, stack) in layer(shape, rest, False)[2].items()} == dict.fromkeys(KERNELS, 0)
