"""float32's own SSD kernels as Triton compiles them for a Hopper card: right on the SIMT machine, without a race, and
within their registers but for a few bytes; and with wgmma, in machine code that is sound (machine_code.py)."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("lab.triton_on_simt")
from kernels.ssd.machine_code import descriptors, sound

KERNELS = {f"{name}_kernel" for name in ("cumsum", "scores", "state", "passing", "scan")}


@pytest.fixture(scope="module")
def layer():
    """layer(shape, rest, run, wgmma), in a process of its own; see triton_float32.py"""
    from triton_float32 import layer

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        yield lambda *given: apart.submit(layer, *given).result()


# batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size
@pytest.mark.parametrize("wgmma", [False, True])
@pytest.mark.parametrize("shape", [(1, 140, 2, 64, 1, 128, 128), (2, 70, 1, 80, 1, 48, 64), (1, 20, 1, 16, 1, 16, 16)])
def test_right_and_without_a_race(layer, shape, wgmma):
    """A race is, too, what one proxy has written and another reads without a fence between the two."""
    y, final, seen = layer(shape, True, True, wgmma)
    assert seen.keys() == KERNELS and y < 1e-5 and final < 1e-5


LARGE = [(1, 600, 2, 64, 1, 128, 128), (1, 600, 2, 128, 2, 256, 512), (1, 99, 1, 80, 1, 64, 64)]


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("shape", LARGE)
def test_no_wgmma_and_hardly_a_number_spills(layer, shape, rest):
    seen = layer(shape, rest, False)[2]
    assert seen.keys() == KERNELS and max(stack for _, stack, _ in seen.values()) <= 64
    assert not any("wgmma" in ptx for ptx, *_ in seen.values())
    assert all("mma.sync" in seen[f"{name}_kernel"][0] for name in ("scores", "state", "scan"))


@pytest.mark.parametrize("shape", LARGE)
def test_wgmma_of_shared_memory_and_nothing_spills(layer, shape):
    """A descriptor is an address in shared memory, not a block's number; nothing is there by cp.async."""
    seen = layer(shape, True, False, True)[2]
    for name in ("state", "scan"):
        ptx, stack, sources = seen[f"{name}_kernel"]
        assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and "cp.async" not in ptx
        assert stack == 0 and sources <= {"SR_CgaCtaId"}


def test_unsound_machine_code_is_seen():
    lines = [
        "S2UR UR8, SR_CTAID.Z", "S2UR UR4, SR_CgaCtaId", "ULEA UR6, UR4, UR5, 0x18", "UMOV UR7, 0x40000040",
        "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4].tnspB, R24, gsb0", "UIADD3 UR6, UR8, 0x80, URZ",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", "@P0 LDL R1, [R3+0x4]",
    ]  # fmt: skip
    lines = [f"        /*{16 * n:04x}*/    {line} ;\n" for n, line in enumerate(lines)]
    first, second = descriptors("".join(lines))
    assert first == {"SR_CgaCtaId"} and "SR_CTAID.Z" in second  # a block's number
    assert sound("".join(lines[:6])) and not sound("".join(lines[:7]))
    assert not sound("".join(lines[:6] + lines[7:])) and not sound("")  # a number brought back; no wgmma at all
