"""fused.cu on the SIMT machine against a float64 recurrence: shapes, shares, races, stand-ins."""

import functools
import math
import sys

import pytest
import torch
from test_ssd_five import off, problem, recurrence

from kernels.ssd import five, fused, which
from kernels.ssd.fused import counters
from kernels.ssd.fused_plan import MOST_TICKETS, plan, shared_bytes
from kernels.ssd.tuned import fused_tuned
from simt import nvrtc

MODULE = sys.modules["kernels.ssd.fused"]  # kernels.ssd.fused is the function
HALF, BF16 = torch.float16, torch.bfloat16
ALLOWED = {HALF: 1e-3, BF16: 6e-3}
SLOW, FAST = 0.02, 30.0


@pytest.fixture
def launched(monkeypatch):
    """launched(processors=..., sort=..., tickets=..., together=...): how fused.cu is launched from here on."""

    def change(processors=132, **chosen):
        MODULE._prepared.cache_clear()
        monkeypatch.setattr(MODULE, "multiprocessors", lambda device: processors)
        monkeypatch.setattr(MODULE, "plan", functools.partial(plan, **chosen))

    yield change
    MODULE._prepared.cache_clear()


def run(call, dtype, **options):
    """y and the final states, between guards, poisoned before the call. Asserts that they are right."""
    assert which(**{k: v for k, v in call.items()})[0] == "fused"
    wanted, states = recurrence(**call)
    home = torch.full((wanted.numel() + 16,), 1234.0, dtype=dtype)
    out = home[8:-8].view(wanted.shape).fill_(torch.nan)
    y, final = fused(**call, out=out, return_final_states=True, **options)
    assert y is out and (home[:8] == 1234).all() and (home[-8:] == 1234).all()
    assert off(y, wanted) < ALLOWED[dtype] and off(final, states[:, -1]) < ALLOWED[dtype]
    return y.clone(), final


def simple(seqlen, nheads=2, ngroups=1, dstate=64, dtype=HALF, rate=None, batch=1, headdim=64):
    call = problem(batch, seqlen, nheads, headdim, ngroups, dstate, dtype, rest=False)
    if rate is not None:
        call["A"] = torch.linspace(-rate, -2 * rate, nheads)
    return call


# batch, seqlen, nheads, headdim, ngroups, dstate, dtype; multiprocessors and plan: irregular first
@pytest.mark.parametrize(
    "shape, dtype, how",
    [
        ((2, 187, 3, 64, 1, 64), BF16, dict(processors=5)),
        ((1, 130, 2, 128, 2, 64), HALF, dict(processors=3)),
        ((1, 200, 4, 64, 2, 128), HALF, dict(processors=7, sort=1)),
        ((2, 300, 7, 64, 1, 64), HALF, dict(processors=19, sort=1)),
        ((2, 190, 7, 64, 1, 64), BF16, dict(processors=12, sort=1, together=4)),
        ((1, 1, 1, 64, 1, 64), HALF, {}),
        ((1, 64, 2, 64, 1, 128), HALF, {}),
        # columns that fill no tile: of x, of B and C, and of both
        ((1, 150, 3, 80, 1, 64), HALF, dict(processors=4, sort=1)),
        ((1, 140, 2, 64, 1, 16), BF16, dict(processors=3)),
        ((2, 70, 3, 48, 1, 96), HALF, dict(processors=3)),
        ((1, 67, 1, 8, 1, 8), HALF, {}),
        # halves of a state
        ((1, 131, 2, 32, 1, 200), HALF, dict(processors=3, sort=1)),
        ((2, 1, 1, 72, 1, 136), BF16, {}),
    ],
)
def test_right_on_hostile_shapes(launched, shape, dtype, how):
    launched(**how)
    run(problem(*shape, dtype), dtype)


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_initial_states_of_16_bits(launched, dtype):
    """The same as when they are widened; at an address of two elements, and of one."""
    launched(processors=2)
    call = simple(70, 2, dtype=dtype, headdim=40)
    states = torch.randn(2 * 40 * 64 + 2).to(dtype)
    wide = fused(**call, initial_states=states[2:].view(1, 2, 40, 64).float())
    y, _ = run(call | {"initial_states": states[2:].view(1, 2, 40, 64)}, dtype)
    assert torch.equal(y, wide)
    assert "two elements" in which(**call, initial_states=states[1:-1].view(1, 2, 40, 64))[1]


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_without_options_and_with_views(launched, dtype):
    """The five tensors alone, x, B, C and dt views of one projection, D a number a head, dt as it is."""
    launched(processors=2)
    call = simple(150, 2, dtype=dtype)
    call.pop("dt_softplus")
    one = torch.cat([call[name].flatten(2) for name in ("x", "B", "C", "dt")] + [torch.zeros(1, 150, 6).to(dtype)], -1)
    x, B, C, dt, _ = one.split([128, 64, 64, 2, 6], -1)
    views = {"x": x.unflatten(-1, (2, 64)), "dt": dt, "A": call["A"], "B": B[:, :, None], "C": C[:, :, None]}
    run(views | {"D": torch.randn(2)}, dtype)


@pytest.mark.parametrize("rate", [SLOW, 1.0, FAST])
def test_shares_and_an_early_stop_change_nothing(launched, rate):
    call = simple(310, 4, rate=rate)
    call["initial_states"] = torch.randn(1, 4, 64, 64)
    seen = []
    for how in (
        dict(processors=1),
        dict(processors=6, sort=1),
        dict(processors=4, sort=1, together=2),
        dict(processors=5, sort=0),
    ):
        launched(**how)
        y, _ = run(call, HALF)
        if not how.get("sort"):  # shares are the same with any stop
            without, _ = run(call, HALF, stop=0)
            assert torch.equal(y, without)  # a decay beyond 2**-STOP is 0
        seen.append(y)
    assert all(off(y, seen[0].double()) < 5e-4 for y in seen)  # different sums, each rounded


def test_a_large_state_is_seen_through_two_pieces(launched):
    """Pieces of a chunk, each of which decays by 2**-17: the third looks back on the first, whose end is huge."""
    launched(processors=5, sort=0)
    call = simple(380, 2)
    call["A"], call["dt"] = torch.full((2,), -1.0), torch.full((1, 380, 2), 17 / 64 * math.log(2)).half()
    call["x"] *= 1e-3
    call["x"][:, 44:64] *= 1e6
    call.pop("dt_softplus")
    wanted, _ = recurrence(**call)
    y = fused(**call)
    assert all(off(part, right) < 2e-3 for part, right in zip(y.split(64, 1), wanted.split(64, 1)))


def test_the_same_bits_in_every_run_and_counters_that_go_on(launched, monkeypatch):
    """Three launches on one counter and its flags, which nobody resets."""
    launched(processors=3)
    call = simple(300, 2, rate=SLOW)
    kept = {}

    def keep(device, p):
        return kept.setdefault(p, torch.zeros(2 + p.flags, dtype=torch.int64))

    monkeypatch.setattr(MODULE, "_flags", keep)
    ys = [fused(**call) for _ in range(3)]
    (counter,) = kept.values()
    p = next(iter(kept))
    assert counter[0] == 3 * (p.tickets + p.blocks)  # a ticket that is none for each block
    assert counter[1] == 3 * p.tickets  # all were done
    assert torch.equal(ys[0], ys[1]) and torch.equal(ys[0], ys[2])


@pytest.mark.parametrize("rate", [SLOW, FAST])
def test_no_race(launched, counted, rate):
    launched(processors=3, sort=1)
    tiles = 5 if rate == SLOW else 4
    call = simple(64 * tiles, 2, rate=rate)
    if rate == SLOW:
        call["A"] = call["A"].flip(0)  # so that sorting moves a row
    report = counters(**call, check_races=True)
    chunks = 3 if rate == SLOW else 2  # of pass 1: all before the last share, or the last of each share
    products = report.counters["simt__wgmma.sum"]
    assert products >= tiles * (4 + 2 * (4 + 6 + 4)) + chunks * 2 * 4
    if rate == FAST:  # and where a pair is walked anew, by one block of those that wrote its y
        x = call["x"].clone()
        x[0, 20, 0, 5] = math.nan
        again = counters(**(call | {"x": x, "z": torch.ones_like(x)}), check_races=True)
        assert again.counters["simt__wgmma.sum"] >= products + tiles * (4 + 2 * (4 + 6 + 4))


def test_bundles_do_not_race(launched, counted):
    """Two of two pairs, each in its group; a share that goes over the border, and fewer blocks than tickets."""
    launched(processors=4)
    call = simple(128, 8, ngroups=2, rate=SLOW)
    report = counters(**call, sort=1, together=2, tickets=6, check_races=True)
    walks = 2 * 4 * (4 + 2 * (4 + 6 + 4))  # chunks of pairs
    assert report.counters["simt__wgmma.sum"] >= walks + 2 * 2 * 4  # and pass 1 of two tickets at least
    launched(processors=4, sort=1, together=2, tickets=6)
    run(call, HALF)


def test_halves_of_a_state_do_not_race_and_know_what_is_not_finite(launched, counted):
    """Two shares of a head: sums handed over, and a state handed on; an infinite x in both halves of a chunk."""
    launched(processors=2)
    call = simple(257, 1, dstate=256, rate=SLOW, headdim=16)
    report = counters(**call, check_races=True)
    products = report.counters["simt__wgmma.sum"]
    assert products == 5 * (16 + 2 * (8 + 4 + 4)) + 2 * 2 * 4  # pass 2 of five chunks, and pass 1 of two
    call = {name: v[:, :65] if name in ("x", "dt", "B", "C") else v for name, v in call.items()}
    clean, _ = run(call, HALF)
    x = call["x"].clone()
    x[0, 20, 0, 5], x[0, 45, 0, 7] = math.inf, math.nan
    y = fused(**(call | {"x": x}))
    expected = torch.zeros(y.shape, dtype=torch.bool)
    expected[0, 20:, 0, 5] = expected[0, 45:, 0, 7] = True
    assert torch.equal(~y.isfinite(), expected)
    assert torch.allclose(y[~expected], clean[~expected], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_what_it_should_and_nothing_else(launched, dtype, bad):
    launched(processors=1)
    call = simple(140, 2, dtype=dtype) | {"D": torch.ones(2)}
    clean = fused(**call)
    x, B = ("x", (0, 90, 1, 5), (0, slice(90, None), 1, 5)), ("B", (0, 90, 0, 3), (0, slice(90, None)))
    C, dt = ("C", (0, 66, 0, 3), (0, 66)), ("dt", (0, 100, 1), (0, slice(100, None), 1))
    for cells in ((C, x), (B,), (dt,)):  # what, where, the outputs that it reaches. C and x: in two warps, and apart
        changed, expected = {}, torch.zeros(clean.shape, dtype=torch.bool)
        for name, where, reached in cells:
            changed[name] = call[name].clone()
            changed[name][where] = bad
            expected[reached] = True
        y = fused(**(call | changed))
        assert not y[expected].isfinite().any(), name
        # A warp that met it adds up its tokens anew, in another order.
        assert torch.allclose(y[~expected], clean[~expected], rtol=1e-3 if dtype is HALF else 1e-2, atol=1e-3), name


@pytest.mark.parametrize("how", [dict(processors=4, sort=1, together=2), dict(processors=8, sort=0)])
def test_what_is_not_finite_goes_on_where_pass_1_stops_early(launched, how):
    """Decays so fast that no share looks further back than a chunk: the rows' pair is walked anew, twice in a row."""
    launched(**how)
    call = simple(300, 3, rate=FAST)
    clean, _ = run(call, HALF)
    x = call["x"].clone()
    x[0, 20, 0, 5], x[0, 70, 1, 7] = math.nan, math.inf
    y, final = fused(**(call | {"x": x}), return_final_states=True)
    expected, lost = torch.zeros(y.shape, dtype=torch.bool), torch.zeros(final.shape, dtype=torch.bool)
    expected[0, 20:, 0, 5] = expected[0, 70:, 1, 7] = lost[0, 0, 5] = lost[0, 1, 7] = True
    assert torch.equal(~y.isfinite(), expected) and torch.equal(~final.isfinite(), lost)
    assert torch.allclose(y[~expected], clean[~expected], rtol=1e-3, atol=1e-3)


def test_where_a_decay_may_become_growth_nothing_is_left_out(launched):
    """dt below 0, as its limits allow and no softplus prevents."""
    launched()
    call = simple(70, 2)
    for low, softplus, never in ((0.0, False, False), (-1.0, True, False), (-1.0, False, True)):
        problem = MODULE.expect_ssd("test", *(call[name] for name in ("x", "dt", "A", "B", "C")))
        tensors = call["x"], call["dt"], call["B"], call["C"], None, None, None, None
        ready = MODULE._prepare(problem, *tensors, False, softplus, (low, 1.0), 127)
        assert (-math.inf in ready.sizes) == never and (-127 in ready.sizes) != never


def test_tiny_and_large_steps_keep_their_digits():
    for size in (1e-5, 30.0):
        call = simple(200, 2)
        call["dt"] = torch.rand(1, 200, 2, generator=torch.Generator().manual_seed(0)) * size
        call["A"] = torch.full((2,), -1 / size / 50)
        call["x"] = call["x"] / max(size, 1)
        call.pop("dt_softplus")
        wanted, _ = recurrence(**call)
        scale = max(1.0, 0.01 / wanted.abs().max().item())  # float16 has no digits to spare below 6e-5
        y = fused(**(call | {"C": call["C"] * scale}))
        assert off(y.double() / scale, wanted) < (5e-3 if size < 1 else 2e-3)


def test_which_rung_runs_and_why():
    call = simple(70, 2)
    assert which(**call) == ("fused", "")
    seq_idx = {"seq_idx": torch.zeros(1, 70, dtype=torch.int32)}
    assert which(**call, **seq_idx) == which(**call, cu_seqlens=torch.tensor([0, 70])) == ("fused", "")
    assert which(**simple(70, 2, dtype=torch.float32), **seq_idx) == ("five", "x is float32")  # fused_tuned has none
    assert which(**simple(70, 2, dstate=136), **seq_idx)[0] == "five"
    x = call["x"]
    others = [
        ({"state_dtype": HALF}, "five", "states"),
        ({"initial_states": torch.zeros(2 * 64 * 64 + 1)[1:].view(1, 2, 64, 64)}, "fused_tuned", "initial_states"),
        ({"x": torch.randn(1, 70, 2, 44).to(HALF)}, "fused_tuned", "headdim is 44"),
        ({"x": torch.randn(1, 70, 2 * 64 + 1).to(HALF)[..., 1:].unflatten(-1, (2, 64))}, "fused_tuned", "x is not at"),
        ({"x": torch.randn(x.numel() + 1).to(HALF)[1:].view(x.shape)}, "fused_tuned", "x is not at"),
        (simple(70, 2, dstate=20), "fused_tuned", "dstate is 20"),
        (simple(70, 2, dstate=164), "five", "dstate is 164"),
        (simple(70, 2, dtype=torch.float32), "five", "float32"),
    ]
    for change, rung, why in others:
        name, reason = which(**(call | change))
        assert name == rung and why in reason
        with (
            pytest.raises(ValueError, match=f"leaves these tensors to {rung}")
            if "state_dtype" not in change
            else pytest.raises(TypeError)
        ):
            counters(**(call | change))


def test_the_rungs_that_run_in_its_place():
    small = problem(1, 40, 2, 16, 1, 16)
    wanted, states = recurrence(**small)
    MODULE._say_once.cache_clear()
    with pytest.warns(UserWarning, match="fused: x is float32. So five runs") as said:
        y, final = fused(**small, chunk_size=256, return_final_states=True)
        fused(**small)  # and says nothing
    assert len(said) == 1
    assert off(y, wanted) < 3e-6 and off(final, states[:, -1]) < 3e-6
    assert torch.equal(y, five(**small, chunk_size=256))
    odd = problem(1, 40, 1, 16, 1, 12, HALF)
    with pytest.warns(UserWarning, match="dstate is 12, no multiple of 8. So fused_tuned runs"):
        y = fused(**odd)
    assert torch.equal(y, fused_tuned(**odd))
    seq_idx = torch.tensor([[0] * 13 + [1] * 27], dtype=torch.int32)
    halves = problem(1, 40, 1, 16, 1, 136, HALF)
    with pytest.warns(UserWarning, match="dstate is 136, with seq_idx or cu_seqlens up to 128. So five runs"):
        y = fused(**halves, seq_idx=seq_idx, chunk_size=32)
    assert torch.equal(y, five(**halves, seq_idx=seq_idx, chunk_size=32))
    assert off(fused(**small, stop=0), wanted) < 3e-6


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"stop": -1}, ValueError, "stop must be"),
        ({"stop": 59.5}, ValueError, "stop must be"),
        ({"stop": True}, ValueError, "stop must be"),
        ({"chunk_size": 48}, ValueError, "chunk_size must be a power of two"),
        ({"dt": torch.zeros(1, 69, 2)}, ValueError, "dt must have shape"),
        ({"C": torch.zeros(1, 70, 1, 128, dtype=HALF)}, ValueError, "C must have shape"),
        ({"D": torch.zeros(3)}, ValueError, "D must have shape"),
        ({"out": torch.zeros(1, 70, 2, 64)}, TypeError, "out must be of"),
    ],
)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        fused(**(simple(70, 2) | change))


def test_tokens_are_counted_in_32_bits():
    one = torch.zeros(1, 1, 1, 8, dtype=HALF)
    for seqlen in ((1 << 31) - 511, 1 << 32):
        x = one.expand(1, seqlen, 1, 8)
        with pytest.raises(ValueError, match=f"seqlen must be at most 2147483136, got {seqlen}"):
            fused(x, x[..., 0], torch.ones(1), x, x)


def test_plans():
    for seqlen in (1, 63, 64, 65, 1000, 4096, 131072, 1 << 20):
        for batch, nheads, headdim, ngroups in ((1, 80, 64, 1), (8, 128, 64, 8), (1, 3, 128, 1), (3, 5, 64, 5)):
            p = plan(batch, seqlen, nheads, headdim, ngroups, 128, 132)
            assert p.chunks == -(-seqlen // 64) and 2 * p.pairs >= batch * nheads * headdim // 64
            assert p.blocks <= 132 and p.tickets <= min(MOST_TICKETS, p.pairs * p.chunks)
            assert p.flags == 2 * p.tickets + p.pairs and p.scratch == 2 * p.tickets * (64 * 128 + 1)
    assert plan(1, 1 << 20, 80, 64, 1, 128, 132)[4:6] == (132, 132)  # tickets, blocks
    bundles = [(47 << 10, 80, 132), (48 << 10, 80, 132), (48 << 10, 20, 132), (48 << 10, 80, 114), (48 << 10, 6, 132)]
    found = [plan(1, n + 1, heads, 64, 1, 128, cards).side_by_side for n, heads, cards in bundles]
    assert found == [0, 2, 1, 1, 0]
    assert plan(1, 300, 6, 64, 1, 64, 12, sort=1, together=3).side_by_side == 0  # three pairs
    halves = plan(2, 4096, 80, 96, 8, 136, 132)  # a row a pair, and a state in halves of 128 columns
    assert halves.pairs == 2 * 160 and halves.scratch == 2 * halves.tickets * (64 * 128 + 1)
    for dstate in (64, 128, 192, 256):
        for z in (False, True):
            assert shared_bytes(dstate, z, sequences=dstate <= 128) <= 227 * 1024


@pytest.mark.parametrize(
    "shape",
    [
        "__half, 64, 128, Steps<__half, float, true>, Skip<float, D_PER_HEAD>, NO_Z, float",
        "__nv_bfloat16, 64, 64, Steps<__half, float, true>, Skip<float, D_PER_HEAD>, NO_Z, float",
        "__half, 80, 112, Steps<__half, float, true>, Skip<float, D_PER_COLUMN>, WITH_Z, __half",
        "__half, 64, 256, Steps<__half, float, true>, Skip<float, D_PER_HEAD>, NO_Z, float",
        "__half, 80, 128, Steps<__half, float, true>, Skip<float, D_PER_HEAD>, WITH_Z, float, MANY_SEQUENCES",
    ],
)
def test_products_are_not_serialised(shape):
    """What the compiler would say of accumulators that it cannot leave in flight; and next to nothing on the stack."""
    module = MODULE._module(f"Shape<{shape}>", 227 * 1024)
    log = nvrtc.compiler_log(module.source, (*module.options, "--ptxas-options=-v"), "sm_90a", module.name)
    assert "C75" not in log
    assert module.resources()["fused"]["spill_stores"] < 64
