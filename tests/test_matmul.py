"""The matmul ladder on the SIMT machine: right on hostile shapes, no race, mistakes that are seen, machine code without
spills, and an error before anything is written for whatever the contract does not allow."""

import functools
import sys
import warnings

import numpy as np
import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand
from matmul_tensors import close, problem

import ref.matmul
import simt
from kernels import matmul
from kernels.matmul import arguments, launching
from kernels.matmul.plan import TILES, cycles, plan
from lab import cuda
from lab.source import inlined
from lab.tensors import DTYPES
from simt import nvrtc

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

NAMES = [rung.name for rung in matmul.RUNGS]
ROOM = 227 * 1024  # bytes of shared memory that a block may have on an H200
HALF, BF16 = torch.float16, torch.bfloat16


def right(rung, m, n, k, dtype, check_races=True, **options):
    """Run a rung, looking for races unless told not to; its report."""
    x, W, out = problem(m, n, k, dtype)
    before = x.clone(), W.clone()
    report = matmul.counters(rung, x, W, out=out, check_races=check_races, **options)
    close(out, x, W)
    assert fences_stand(out)
    assert torch.equal(x, before[0]) and torch.equal(W, before[1])
    return report


# Each rung in one dtype, compiled once; the chapter holds all of them to the reference in bf16.
each = pytest.mark.parametrize("name, dtype", [(name, (HALF, BF16)[i % 2]) for i, name in enumerate(NAMES)])

# Machine code: first, as what is assembled here need not be assembled again (conftest.py)


@each
def test_no_rung_spills(name, dtype):
    option = "-DSHAPE=Shape<__half, 128, 256, 2, 4, 16, 1, 1, ThroughTma>"
    module = launching.kernel(name, option if name == "planned" else f"-DDTYPE={DTYPES[dtype]}").module
    arch = module.arch or "sm_90"
    used = module.resources(arch)["matmul"]
    most = {"specialised": 168, "persistent": 168, "planned": 168, "tile": 255}.get(name, 128)
    assert used["spill_stores"] == used["spill_loads"] == used["stack"] == 0 and used["registers"] <= most
    log = nvrtc.compiler_log(module.source, (*module.options, "--ptxas-options=-v"), arch, module.name)
    assert "C75" not in log  # products made one after another, or registers that do not move


def test_tma_overwrites_what_has_come():
    """A fence stands between a step's last ldmatrix and its release. Neither the machine nor a test on a card sees that
    it is needed: only where loads are kept waiting does TMA come first."""
    ptx = launching.kernel("tma", "-DDTYPE=__nv_bfloat16").module.ptx()
    behind = ptx[ptx.rindex("ldmatrix.sync") :]
    assert 0 < behind.index("fence.proxy.async.shared::cta") < behind.index("mbarrier.arrive.shared::cta.b64")


# Right


@each
def test_one_number(name, dtype):
    n, k = 8 if name == "persistent" else 1, 1 if name == "tile" else 8
    right(name, 1, n, k, dtype, check_races=False)  # which the next looks for


# Past a tile, and so many steps that the ring's stages, three, four or eight, come again; the last is cut off. The
# chapter has several rows of tiles, too.
@each
def test_right_past_a_tile(name, dtype):
    n = {"persistent": 264, "specialised": 259}.get(name, 131)
    m = 67 if name == "planned" else 3
    k = {"tile": 83, "persistent": 136, "specialised": 264, "planned": 136}.get(name, 200)
    options = {"persistent": {"processors": 1}, "planned": {"processors": 1, "tile": (64, 128, 1)}}.get(name, {})
    options["check_races"] = name not in ("specialised", "persistent")  # test_in_any_order does, for both
    right(name, m, n, k, dtype, **options)


@pytest.mark.parametrize("name", ["mma", "planned"])
def test_a_prime_of_each(name):
    right(name, 67, 71, 88, BF16)


CONFIGURATIONS = [  # tile, m, n, what else the plan is told
    ((128, 256, 2), 99, 264, {}),
    ((64, 256, 2), 67, 264, {"group": 1}),
    ((256, 128, 2), 259, 120, {}),
    ((128, 128, 2), 99, 131, {"splits": 3}),
    ((64, 128, 2), 67, 264, {"cluster": (2, 2)}),
    ((64, 128, 1), 67, 136, {"cluster": (1, 2), "stages": 2}),
    ((128, 256, 2), 131, 264, {"cluster": 2}),
]


@pytest.mark.parametrize("tile, m, n, chosen", CONFIGURATIONS, ids=str)
def test_every_shape_of_tiles(tile, m, n, chosen):
    """One block, or two, for all tiles, so that phases and buffers go on from one to the next. To look for races takes
    longer with large tiles; the rungs before have them."""
    blocks, races = {(2, 2): 4, None: 1 + ("splits" in chosen)}.get(chosen.get("cluster"), 2), tile[:2] == (64, 128)
    k = 136 if "splits" in chosen else 72
    report = right("planned", m, n, k, HALF, races, tile=tile, processors=blocks, **chosen)
    assert report.grid[0] == blocks


@pytest.mark.parametrize("order, places", [("reverse", 1), (3, 2)])
def test_in_any_order(order, places):
    right("persistent", 5, 520, 72, HALF, processors=2, order=order, places=places)


def test_infinity_and_nan_stay_where_they_belong():
    x, W, out = problem(130, 136, 72, HALF)
    x[129, 71], W[0, 0] = torch.inf, torch.nan
    matmul.counters("planned", x, W, out=out)
    assert out[:, 0].isnan().all() and out[129, 1:].isinf().all()
    close(out[:129, 1:], x[:129], W[1:])


# linear


def test_linear_takes_any_axes():
    x, W = torch.randn(2, 3, 24).bfloat16(), torch.randn(5, 24).bfloat16()
    y = matmul.linear(x, W)
    assert y.shape == (2, 3, 5) and y.dtype == BF16 and y.is_contiguous()
    close(y.view(6, 5), x.view(6, 24), W)
    assert matmul.linear(x[0, 0], W).shape == (5,)
    out = torch.full_like(y, torch.nan)
    assert matmul.linear(x, W, out=out) is out and torch.equal(out, y)
    assert matmul.which(x, W) == ("planned", "")


def test_linear_pads_and_says_so_once(monkeypatch):
    monkeypatch.setattr(matmul, "_said", set())
    x, W, out = problem(9, 11, 13, BF16)
    with pytest.warns(UserWarning, match=r"linear: x and W must have a multiple of 8 columns, got 13: padded copies"):
        matmul.linear(x, W, out=out)
    close(out, x, W)
    assert fences_stand(out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matmul.linear(x, W, out=out)
    x, W = (between(t.contiguous(), skip=1) for t in (x[:, :8], W[:, :8]))
    assert matmul.which(x, W)[0] == "planned" and "x must be at a multiple of 16 bytes" in matmul.which(x, W)[1]
    with pytest.warns(UserWarning, match="a multiple of 16 bytes, got an address 2 bytes past one: padded copies"):
        close(matmul.linear(x, W), x, W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matmul.linear(between(x.clone(), skip=1), W)  # elsewhere, for the same reason


@pytest.mark.parametrize("skip", [1, 2])
def test_y_at_any_address(skip):
    x, W, _ = problem(9, 16, 16, BF16)
    out = between(torch.full((9, 16), torch.nan, dtype=BF16), FENCE, skip)
    matmul.linear(x, W, out=out)
    close(out, x, W)
    assert fences_stand(out)


@pytest.mark.parametrize("name", [*NAMES, "linear"])
def test_empty_matrices(name):
    call = getattr(matmul, name)
    assert call(torch.empty(0, 8).half(), torch.ones(3, 8).half()).shape == (0, 3)
    assert call(torch.ones(2, 8).half(), torch.empty(0, 8).half()).shape == (2, 0)
    out = torch.full((2, 3), torch.nan).half()
    assert call(torch.empty(2, 0).half(), torch.empty(3, 0).half(), out=out) is out and (out == 0).all()


# Bad input

GOOD, MEMORY = torch.ones(4, 16).half(), torch.ones(80).half()
BAD = [
    (([1], GOOD), {}, TypeError, "x must be a torch tensor, got list"),
    ((GOOD, None), {}, TypeError, "W must be a torch tensor, got NoneType"),
    ((torch.tensor(1.0).half(), GOOD), {}, ValueError, r"x must have shape \(..., k\), got a tensor without axes"),
    ((GOOD.float(), GOOD), {}, TypeError, "x must be of torch.float16 or torch.bfloat16, got torch.float32"),
    ((GOOD.double(), GOOD.double()), {}, TypeError, "x must be of .* or torch.bfloat16, got torch.float64"),
    ((GOOD, GOOD.bfloat16()), {}, TypeError, "W must be of torch.float16, like the first tensor, got torch.bfloat16"),
    ((GOOD, GOOD[:, :8].contiguous()), {}, ValueError, r"W must have shape \(n, 16\), got \(4, 8\)"),
    ((GOOD, GOOD.view(1, 4, 16)), {}, ValueError, r"W must have shape \(n, 16\), got \(1, 4, 16\)"),
    ((GOOD, GOOD[0]), {}, ValueError, r"W must have shape \(n, 16\), got \(16,\)"),
    ((GOOD, GOOD.t().contiguous().t()), {}, ValueError, r"W must be contiguous, .* with strides \(1, 4\)"),
    ((GOOD[:, ::2], GOOD[:, :8].contiguous()), {}, ValueError, r"x must be contiguous, .* with strides \(16, 2\)"),
    ((GOOD, GOOD.to("meta")), {}, ValueError, "W must be on cpu, like the first tensor, got one on meta"),
    ((GOOD.to("meta"), GOOD), {}, ValueError, "x must be on the CPU or on a CUDA device, got a tensor on meta"),
    ((GOOD.to_sparse(), GOOD), {}, ValueError, "x must be a dense tensor, got layout torch.sparse_coo"),
    ((GOOD, GOOD), {"out": torch.zeros(4, 4)}, TypeError, "out must be of torch.float16, .* got torch.float32"),
    ((GOOD, GOOD), {"out": torch.zeros(4, 5).half()}, ValueError, r"out must have shape \(4, 4\), got \(4, 5\)"),
    ((GOOD, GOOD), {"out": torch.zeros(4, 4).half().to("meta")}, ValueError, "out must be on cpu, .* got one on meta"),
    ((GOOD, GOOD), {"out": torch.zeros(4, 8).half()[:, ::2]}, ValueError, r"out must be contiguous, .* \(8, 2\)"),
    ((GOOD, GOOD), {"out": torch.zeros(4, 4).half().requires_grad_()}, ValueError, "out must not require gradients"),
    ((GOOD, GOOD), {"out": GOOD.numpy()}, TypeError, "out must be a torch tensor, got ndarray"),
    ((MEMORY[:64].view(4, 16), GOOD), {"out": MEMORY[63:79].view(4, 4)}, ValueError, "out must not share .* with x"),
    ((GOOD, MEMORY[15:79].view(4, 16)), {"out": MEMORY[:16].view(4, 4)}, ValueError, "out must not share .* with W"),
]


@pytest.mark.parametrize("arguments, options, error, message", BAD, ids=[b[3][:40] for b in BAD])
@pytest.mark.parametrize("name", ["linear", "tma"])
def test_bad_input(name, arguments, options, error, message):
    out = torch.full((4, 4), torch.nan).half()
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(matmul, name)(*arguments, **{"out": out, **options})
    assert out.isnan().all() and (GOOD == 1).all() and (MEMORY == 1).all()  # nothing has been written


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tile"])
def test_rungs_say_what_they_do_not_take(name):
    odd = torch.ones(8, 13).half()
    with pytest.raises(ValueError, match=f"{name}: x and W must have a multiple of 8 columns, got 13.*linear take any"):
        getattr(matmul, name)(odd, odd)
    moved = between(torch.ones(8, 16).half(), skip=1)
    with pytest.raises(ValueError, match=f"{name}: W must be at a multiple of 16 bytes, got an address 2 "):
        getattr(matmul, name)(torch.ones(8, 16).half(), moved)


def test_persistent_says_what_it_cannot_store():
    with pytest.raises(ValueError, match="persistent: W must have a multiple of 8 rows, as TMA stores y, got 4"):
        matmul.persistent(GOOD, GOOD)
    W, out = torch.ones(8, 16).half(), between(torch.ones(4, 8).half(), skip=1)
    with pytest.raises(ValueError, match="persistent: out must be at a multiple of 16 bytes"):
        matmul.persistent(GOOD, W, out=out)


def test_too_many_rows():
    with pytest.raises(ValueError, match="x must have less than 2\\*\\*31 - 256 rows, got 2147483648"):
        matmul.linear(torch.ones(1).half().expand(2**31, 0), torch.ones(1, 0).half())


def test_counters_say_what_they_do_not_know():
    with pytest.raises(ValueError, match="rung must be one of tile, mma, .*, got 'linear'"):
        matmul.counters("linear", GOOD, GOOD)
    with pytest.raises(ValueError, match="counters: splits must not be given for rung tma"):
        matmul.counters("tma", GOOD, GOOD, splits=2)
    with pytest.raises(ValueError, match="counters: x and W must not be empty"):
        matmul.counters("tma", GOOD[:0], GOOD)


def card(monkeypatch, *capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return torch.device("cuda", 0)


def test_a_card_without_the_instructions(monkeypatch):
    device = card(monkeypatch, 8, 6)
    with pytest.raises(RuntimeError, match=r"wgmma: needs a card of compute capability 9.0, got 8.6; linear runs"):
        arguments.expect_card("wgmma", device)
    with pytest.raises(RuntimeError, match=r"tma: needs a card of compute capability 9.0 or newer, got 8.6"):
        arguments.expect_card("tma", device)
    arguments.expect_card("mma", device)
    assert "9.0, got 8.6: the rung mma runs instead" in arguments.why_slower(device)[1]
    device = card(monkeypatch, 10, 0)
    arguments.expect_card("tma", device)
    with pytest.raises(RuntimeError, match="planned: needs a card of compute capability 9.0, got 10.0"):
        arguments.expect_card("planned", device)
    assert arguments.why_slower(card(monkeypatch, 9, 0)) == ("planned", "")
    device = card(monkeypatch, 7, 5)
    arguments.expect_card("linear", device)
    assert arguments.why_slower(device)[0] == "tile"
    with pytest.raises(RuntimeError, match="^mma: needs a card of .* 8.0 or newer, got 7.5; linear runs the rung tile"):
        arguments.expect_card("mma", device)
    with pytest.raises(RuntimeError, match="^linear: needs a card of compute capability 7.5 or newer, got 6.1$"):
        arguments.expect_card("linear", card(monkeypatch, 6, 1))


def test_linear_on_such_a_card(monkeypatch):
    """As if the tensors were there: it runs mma, and says why, with what else is slow."""
    slower = arguments.why_slower(card(monkeypatch, 8, 6))
    monkeypatch.setattr(matmul, "why_slower", lambda device: slower)
    monkeypatch.setattr(matmul, "_said", set())
    x, W, out = problem(9, 11, 13, BF16)
    with pytest.warns(UserWarning, match="got 8.6: the rung mma runs instead; x and W must have .* padded copies"):
        matmul.linear(x, W, out=out)
    close(out, x, W)
    assert fences_stand(out) and matmul.which(x, W)[0] == "mma"


# The plan


def test_the_plan_cuts_where_tiles_are_few():
    big, small, long = (plan(m, n, k, 132, ROOM) for m, n, k in ((4096,) * 3, (64, 512, 512), (16, 4096, 14336)))
    assert big[:3] == (128, 256, 2) and big.cluster == (2, 1) and big.splits == 1 and big.blocks == 132
    assert small.rows == 64 and small.blocks == small.units < 132
    assert long.splits > 1 and long.units <= 132
    for m, n, k in ((1, 1, 1), (1, 1, 100_000), (129, 1, 64), (8192, 28672, 8192), (2**20, 16, 16)):
        p = plan(m, n, k, 132, ROOM)
        assert p.shared <= ROOM and p.stages >= 3 and p.splits <= max(1, -(-k // 64)) and 1 <= p.blocks <= 132
        assert p.rows * p.columns * p.units >= m * n * p.splits
        chosen = next(tile for tile in TILES if (*tile[:3], tile.cluster) == (*p[:3], p.cluster))
        assert all(cycles(m, n, k, chosen, p.splits, 132) <= cycles(m, n, k, tile, 1, 132) for tile in TILES)
    assert plan(129, 300, 64, 1, ROOM).cluster == (1, 1)  # of two blocks there is no room for both


@pytest.mark.parametrize(
    "chosen, said",
    [
        ({"tile": (100, 64, 1)}, "tile must have multiples of 64"),
        ({"tile": (64, 512, 2)}, "at most 256 columns"),
        ({"tile": (64, 128, 3)}, "1 or 2 consumers"),
        ({"cluster": (2, 2)}, r"cluster must have 1 to 2 blocks, .* got \(2, 2\)"),
        ({"cluster": 0}, "cluster must have"),
        ({"splits": 4}, "splits must be 1 to 3, the steps of 64 of k, got 4"),
    ],
)
def test_what_a_plan_cannot_be(chosen, said):
    with pytest.raises(ValueError, match=f"plan: .*{said}"):
        plan(64, 64, 136, 2, ROOM, **chosen)


def test_tiles_in_the_order_of_the_reference():
    source = (
        inlined("kernels/matmul/tiles.cuh")
        + """
extern "C" __global__ void order(int2 *to, int rows, int columns) {
    const TileOrder<3> order{rows, columns};
    for (int i = threadIdx.x; i < order.count(); i += blockDim.x) to[i] = order.at(i);
}"""
    )
    kernel = cuda.compile(source).order
    for rows, columns in ((1, 1), (3, 4), (7, 5), (2, 9)):
        to = torch.full((rows * columns, 2), -1, dtype=torch.int32)
        kernel(1, 32, to, rows, columns)
        assert to.tolist() == [list(tile) for tile in ref.matmul.tile_order(rows, columns, 3)]


def test_the_reference_walks_as_the_kernels_do():
    rng = np.random.default_rng(0)
    x, W = rng.standard_normal((37, 29)), rng.standard_normal((23, 29))
    wanted = ref.matmul.linear(x, W)
    assert np.allclose(wanted, [[sum(a * b) for b in W] for a in x])
    assert np.allclose(ref.matmul.linear_tiled(x, W, (8, 5, 4), band=2), wanted)
    assert np.allclose(wanted, ref.matmul.matmul(x, W.T))


# Counters that the chapter states


def test_exchanged_words_meet_no_conflicts():
    for name in ("mma", "tma"):
        counters = matmul.counters(name, *problem(128, 128, 64, BF16)[:2]).counters
        assert counters["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"] == 0
    counters = matmul.counters("planned", *problem(64, 128, 64, HALF)[:2], tile=(64, 128, 1)).counters
    assert counters["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"] == 0


def test_what_is_copied_and_multiplied():
    counters = matmul.counters("persistent", *problem(128, 256, 128, HALF)[:2]).counters
    assert counters["simt__bulk_load_bytes.sum"] == 2 * (128 + 256) * 128  # two steps
    assert counters["simt__bulk_store_bytes.sum"] == 2 * 128 * 256
    assert counters["simt__wgmma.sum"] == 2 * 2 * 4  # steps, consumers, k16


# Mistakes: (file of the rung, what stands there once, what is put in its place, the errors that may show it)

ANY = simt.SimtError
WRONG = AssertionError
MISTAKES = {
    "mma: no barrier": ("mma", "        __syncthreads(); // all have copied", "        // all", simt.RaceError),
    "mma: waits for one group too few": ("mma", "copy_async_wait<STAGES - 2>", "copy_async_wait<STAGES - 1>", ANY),
    "mma: fills the stage that is read": ("mma", "fill(step + STAGES - 1);", "fill(step + STAGES);", ANY),
    "ring: does not wait for an empty stage": ("ring", "        ring.wait_empty(filling);\n", "", simt.RaceError),
    "ring: does not wait for a full stage": ("ring", "        ring.wait_full(reading);\n", "", ANY),
    "ring: arrives without its copies": (
        "ring", "ring.full[filling.stage].arrive_with_copies()", "ring.full[filling.stage].arrive()", ANY),
    "ring: a lane speaks for a warp that still reads": ("ring", "        __syncwarp();\n", "", ANY),
    "tma: announces the bytes of x alone": ("tma", "expect(sizeof(Stage))", "expect(sizeof(stage.x))", ANY),
    "tma: the parity of a round does not change": ("tma", "stage = 0, parity ^= 1", "stage = 0", ANY),
    "wgmma: does not wait for its products": ("wgmma", "        wgmma_wait<0>();\n", "", simt.AsyncFault),
    "wgmma: no commit": ("wgmma", "        wgmma_commit();\n", "", simt.AsyncFault),
    "wgmma: rows of both groups from the first": ("wgmma", "stage.x + group_row * ROW", "stage.x", WRONG),
    "specialised: releases what is still read": ("specialised", "        wgmma_wait<1>();", "", simt.AsyncFault),
    "specialised: never releases": (
        "specialised", "if (step > 0 && lane == 0) ring.release(before);", "", simt.Deadlock),
    "persistent: keeps a tile's last stage": (
        "persistent", "    if (lane == 0) shared.ring.release(before);\n}", "}", simt.Deadlock),
    "persistent: each tile begins with the first stage": (
        "persistent", "            const int2 tile = order.at(i); // 1",
        "            phase = Phase<STAGES>();\n            const int2 tile = order.at(i); // 1", ANY),
    "stores: no fence between threads and TMA": (
        "planned", "            fence_async_proxy();\n", "", simt.RaceError),
    "stores: what is not written yet": (
        "planned", "            fence_async_proxy();\n            named_barrier<128>(1 + consumer);\n",
        "            fence_async_proxy();\n", ANY),
    "stores: writes over what is still stored": (
        "planned", "            if (thread == 0) store_wait_read<BUFFERS - 1>();", "           ", ANY),
    "stores: waits for one too few": ("planned", "store_wait_read<BUFFERS - 1>", "store_wait_read<BUFFERS>", ANY),
    "stores: no commit": ("planned", "                store_commit();\n", "", ANY),
    "stores: leaves before they are done": (
        "planned", "    if (same<S::Output, ThroughTma> && thread == 0) store_wait();", "", ANY),
    "planned: a part begins at the first step": (
        "planned", "begin = steps * part / splits", "begin = 0", WRONG),
    "planned: the second half of the columns again": ("planned", "stage.w + column * ROW", "stage.w", WRONG),
    "planned: buffers do not take turns": ("planned", "            buffer ^= 1;\n", "", ANY),
    "cluster: both blocks bring the same half": (
        "planned", "to + mine * PART * ROW, map, first + mine * PART", "to, map, first", ANY),
    "cluster: a reader is asked for by one block": (
        "planned", "ring.init(1, 4 * S::CONSUMERS * S::SHARERS)", "ring.init(1, 4 * S::CONSUMERS)", ANY),
    "cluster: released in one's own block": (
        "planned", "lane < S::SHARERS) arrive_at(ring.empty[phase.stage], sharer)", "lane == 0) ring.release(phase)",
        simt.Deadlock),
    "cluster: leaves while the other still reads": (
        "planned", "    if constexpr (S::CLUSTER > 1) cluster_barrier(); // nobody", "    // nobody", simt.AsyncFault),
}  # fmt: skip
PLANTED = {  # what counters are told; m, n, k
    "persistent: each tile begins with the first stage": ({"processors": 1}, (5, 264, 72)),
    "planned: a part begins at the first step": ({"tile": (64, 128, 2), "splits": 2, "processors": 2}, (5, 24, 200)),
    "planned: the second half of the columns again": ({"tile": (64, 128, 2)}, (5, 128, 64)),
    "planned: buffers do not take turns": ({"tile": (64, 256, 2)}, (5, 256, 64)),
}
BOXES = {"tile": (64, 64, 1), "processors": 1}, (5, 200, 8)  # four tiles, of one block
PAIR = {"tile": (64, 64, 1), "cluster": 2, "processors": 2, "stages": 2}, (70, 24, 200)


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_seen(what, monkeypatch):
    rung, old, new, error = MISTAKES[what]
    text = inlined(f"kernels/matmul/{rung}.cu")
    assert text.count(old) == 1, text.count(old)
    of_kind = {"cluster": PAIR, "stores": BOXES, "persistent": ({"processors": 1}, (5, 520, 72))}
    options, shape = PLANTED.get(what) or of_kind.get(what.partition(":")[0], ({}, None))
    if rung not in ("persistent", "planned"):
        shape = 70 if error is WRONG else 5, 24, 264
    plain = launching.kernel

    @functools.cache
    def kernel(name, option):
        if name != rung:
            return plain(name, option)
        same_lines = new + "\n" * (old.count("\n") - new.count("\n"))
        return cuda.compile(text.replace(old, same_lines), (option,), arch="sm_90a", name=f"{rung}.cu").matmul

    monkeypatch.setattr(launching, "kernel", kernel)
    with pytest.raises(error):
        right(rung, *shape, HALF, error not in (simt.Deadlock, WRONG), **options)
