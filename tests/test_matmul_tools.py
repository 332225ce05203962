"""Hopper's tools, each alone in a kernel of some twenty lines: what it does, and what is seen without it."""

import sys

import numpy as np
import pytest
import torch

import simt
from kernels.matmul import HERE
from lab import cuda
from lab.source import inlined
from lab.tensor_map import TensorMap

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

BANKS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"


def tool(name, *changes, options=()):
    """The kernel of a tool, in whose source, headers too, each (old, new) is planted: old stands there once."""
    text = inlined(f"kernels/matmul/tools/{name}.cu")
    for old, new in changes:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return cuda.compile(text, options, name=f"{name}.cu", arch="sm_90a")[name]


def numbers(*shape, dtype=torch.float16):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# A ring of mbarriers


def handed_on(kernel, rows):
    from_ = torch.arange(32 * rows, dtype=torch.int32)
    to = torch.full_like(from_, -1)
    kernel(1, 64, from_, to, rows, check_races=True)
    return torch.equal(to.view(rows, 32), from_.view(rows, 32).flip(1))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 8])
def test_a_ring_hands_on_every_row(rows):
    assert handed_on(tool("ring"), rows)


WAIT_EMPTY, WAIT_FULL = "            ring.wait_empty(phase);\n", "            ring.wait_full(phase);\n"
RINGS = {
    "the filler does not wait": (WAIT_EMPTY, "", simt.RaceError),
    "the reader does not wait": (WAIT_FULL, "", simt.RaceError),
    "the filler's parity": ("wait(phase.parity ^ 1)", "wait(phase.parity)", simt.Deadlock),
    "the reader's parity": ("full[phase.stage].wait(phase.parity)", "full[phase.stage].wait(0)", simt.SimtError),
    "the parity does not change": ("stage = 0, parity ^= 1", "stage = 0", simt.SimtError),
    "nothing is released": ("            ring.release(phase);\n", "", simt.Deadlock),
    "nobody says that it is full": ("            ring.full[phase.stage].arrive();\n", "", simt.Deadlock),
    "half of the arrivals are enough": ("ring.init(32, 32)", "ring.init(16, 32)", simt.SimtError),
    "one arrival too many": ("ring.init(32, 32)", "ring.init(33, 32)", simt.Deadlock),
}


@pytest.mark.parametrize("what", RINGS)
def test_a_mistake_in_the_ring_is_seen(what):
    old, new, error = RINGS[what]
    with pytest.raises(error):
        assert not handed_on(tool("ring", (old, new)), 8)


# A box by TMA


@pytest.mark.parametrize("row, column", [(0, 0), (64, 8), (-3, 40)])
def test_a_box_comes_with_zeros_outside(row, column):
    matrix, to = numbers(100, 72), torch.full((64, 64), torch.nan, dtype=torch.float16)
    tool("box")(1, 128, TensorMap(matrix, (64, 64), 128), to, row, column, check_races=True)
    whole = torch.zeros(300, 300, dtype=torch.float16)
    whole[100:200, :72] = matrix
    assert torch.equal(to, whole[100 + row : 164 + row, column : column + 64])


BOXES = {
    "nobody waits": ("    full.wait(0);\n", "", simt.MemoryFault),
    "the wrong parity": ("full.wait(0)", "full.wait(1)", simt.SimtError),
    "too few bytes": ("full.expect(sizeof(tile))", "full.expect(sizeof(tile) / 2)", simt.SimtError),
    "too many bytes": ("full.expect(sizeof(tile))", "full.expect(2 * sizeof(tile))", simt.Deadlock),
    "no barrier behind init": ("    __syncthreads(); // the barrier is initialised\n", "", simt.SimtError),
    "the tile lies anywhere": (
        "__align__(1024) unsigned char tile[64 * ROW];",
        "__align__(1024) unsigned char home[65 * ROW];\n    unsigned char *tile = home + 128;",
        simt.MemoryFault,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BOXES)
def test_a_mistake_with_the_box_is_seen(what):
    old, new, error = BOXES[what]
    changes = [(old, new)] + [("full.expect(sizeof(tile))", "full.expect(64 * ROW)")] * ("anywhere" in what)
    to = torch.zeros(64, 64, dtype=torch.float16)
    with pytest.raises(error):
        tool("box", *changes)(1, 128, TensorMap(numbers(100, 72), (64, 64), 128), to, 0, 0, check_races=True)


# ldmatrix, and where words lie


def test_exchanged_words_are_read_without_conflicts():
    tile = numbers(64, 64)
    found, conflicts = [], []
    for exchanged in (0, 1):
        to = torch.full((4, 4, 32, 8), torch.nan, dtype=torch.float16)
        report = tool("fragments", options=(f"-DEXCHANGED={exchanged}",))(1, 32, tile, to)
        found.append(to)
        conflicts.append(report.counters[BANKS])
    assert torch.equal(*found)
    assert conflicts == [16 * 4 * 7, 0]  # seven further goes for each matrix of eight rows
    # lane 4g + c has rows g, g + 8 and columns 2c, 2c + 1, then the same 8 columns on (device/mma.cuh)
    parts = tile.view(4, 2, 8, 4, 2, 4, 2)  # block row, half, g, block column, half, c, pair
    wanted = parts.permute(0, 3, 2, 5, 4, 1, 6).reshape(4, 4, 32, 8)
    assert torch.equal(found[0], wanted)


# wgmma


def multiplied(kernel, dtype=torch.float16):
    a, b, to = (
        numbers(64, 64, dtype=dtype),
        numbers(64, 65, dtype=dtype)[:, :64].contiguous(),
        torch.full((64, 64), torch.nan),
    )
    kernel(1, 128, a, b, to, check_races=True)
    return torch.equal(to.double(), a.double() @ b.double().T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_product(dtype):
    name = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}[dtype]
    assert multiplied(tool("product", options=(f"-DDTYPE={name}",)), dtype)


PRODUCTS = {
    "no fence for the operands": ("    fence_async_proxy();\n", "", simt.RaceError),
    "no barrier for the operands": ("    __syncthreads();\n", "", simt.SimtError),
    "no fence in front": ("    wgmma_fence();\n#", "#", simt.AsyncFault),
    "no commit": ("    wgmma_commit();\n    wgmma_wait", "    wgmma_wait", simt.AsyncFault),
    "no wait": ("    wgmma_wait<0>();\n", "", simt.AsyncFault),
    "groups of 8 rows are 512 bytes apart": ("(1024 >> 4) << 32", "(512 >> 4) << 32", AssertionError),
    "words are not exchanged": ("(Descriptor)1 << 62", "(Descriptor)0 << 62", AssertionError),
    "the next 16 of k are 16 bytes on": ("advance(right, 32 * i)", "advance(right, 16 * i)", AssertionError),
    "sums of the time before stay": ("i > 0, DTYPE()", "i > 1, DTYPE()", AssertionError),
}


@pytest.mark.parametrize("what", PRODUCTS)
def test_a_mistake_in_the_product_is_seen(what):
    old, new, error = PRODUCTS[what]
    with pytest.raises(error):
        assert multiplied(tool("product", (old, new)))


# Registers that move


def test_registers_move():
    moved, stayed = (tool("registers", options=(f"-DMOVES={moves}",)) for moves in (1, 0))
    used, otherwise = (kernel.module.resources()["registers"] for kernel in (moved, stayed))
    assert otherwise["spill_stores"] > 0 and used["spill_stores"] == used["stack"] == 0 and used["registers"] == 168
    x, to = torch.randn(456), torch.full((2, 128, 200), torch.nan)
    moved(1, 384, x, to, 256)  # as it was assembled: not compiled again
    products = x[:256, None] * x.unfold(0, 200, 1)[:256]
    assert torch.allclose(to, products.view(2, 128, 200).sum(0), atol=1e-5) and torch.equal(to[0], to[1])


# A store by TMA


def stored(kernel, row, column):
    tile, y = numbers(64, 64), torch.full((100, 72), torch.nan, dtype=torch.float16)
    kernel(1, 128, tile, TensorMap(y, (64, 64), 128), row, column, check_races=True)
    wanted = torch.full_like(y, torch.nan)
    wanted[row : row + 64, column : column + 64] = tile[: 100 - row, : 72 - column]
    return np.array_equal(y.numpy(), wanted.numpy(), equal_nan=True)


@pytest.mark.parametrize("row, column", [(0, 0), (64, 8), (99, 64)])
def test_a_box_is_stored_as_far_as_it_lies_inside(row, column):
    assert stored(tool("store"), row, column)


STORES = {
    "no fence": ("    fence_async_proxy(); //", "    //", simt.RaceError),
    "no barrier": ("    __syncthreads();\n", "", simt.SimtError),
    "no commit": ("        store_commit();\n", "", simt.AsyncFault),
    "no wait": ("        store_wait(); //", "        //", simt.AsyncFault),
}


@pytest.mark.parametrize("what", STORES)
def test_a_mistake_with_the_store_is_seen(what):
    old, new, error = STORES[what]
    with pytest.raises(error):
        assert not stored(tool("store", (old, new)), 0, 0)


# A cluster of two


def shared_by_two(kernel):
    matrix, to = numbers(64, 64), torch.full((2, 64, 64), torch.nan, dtype=torch.float16)
    report = kernel(2, 128, TensorMap(matrix, (32, 64), 128), to, cluster=(2, 1, 1), check_races=True)
    return torch.equal(to, matrix.expand(2, 64, 64)) and report.counters["simt__bulk_load_bytes.sum"] == matrix.nbytes


def test_two_blocks_share_a_box():
    assert shared_by_two(tool("cluster"))


CLUSTERS = {
    "no barrier in front": ("    cluster_barrier(); // the", "    __syncthreads(); // the", simt.RaceError),
    "nobody waits": ("    full.wait(0);", "   ", simt.SimtError),
    "for one of them": ("0, full, 3)", "0, full, 1)", simt.SimtError),
    "half of the bytes": ("full.expect(sizeof(tile))", "full.expect(sizeof(tile) / 2)", simt.SimtError),
}


@pytest.mark.parametrize("what", CLUSTERS)
def test_a_mistake_with_a_cluster_is_seen(what):
    old, new, error = CLUSTERS[what]
    with pytest.raises(error):
        assert not shared_by_two(tool("cluster", (old, new)))


def test_tools_are_short():
    for path in (HERE / "tools").glob("*.cu"):
        code = path.read_text().split('extern "C"')[1]
        assert len(code.splitlines()) <= 25, path.name
