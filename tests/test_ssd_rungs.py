"""Chapter 13's rungs in Triton's interpreter, against a float64 recurrence; their counters and flags; and bad input."""

import math
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ssd_five import off, problem, recurrence

import ref.ssd
import simt
from kernels.ssd import segments, workspace
from kernels.ssd.overlap import fused_overlap
from kernels.ssd.published import fused_published
from kernels.ssd.registers import fused_registers
from kernels.ssd.rungs import RUNGS
from kernels.ssd.segments import fused_segments, segment_count
from kernels.ssd.tuned import fused_tuned
from lab import cuda_driver

FUNCTIONS = [rung.function for rung in RUNGS]
TWO_PASSES = [fused_segments, fused_tuned]
ALLOWED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size: irregular first
SHAPES = [(2, 37, 4, 24, 2, 40, 32), (1, 1, 2, 16, 1, 16, 16), (1, 33, 3, 70, 3, 100, 16), (1, 64, 2, 8, 1, 5, 32)]


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("rung", FUNCTIONS)
def test_right_on_hostile_shapes(rung, dtype):
    for *shape, chunk_size in SHAPES:
        call = problem(*shape, dtype)
        wanted, states = recurrence(**call)
        home = torch.full((wanted.numel() + 16,), 1234.0, dtype=dtype)
        out = home[8:-8].view(wanted.shape).fill_(torch.nan)
        y, final = rung(**call, chunk_size=chunk_size, out=out, return_final_states=True)
        assert y is out and off(y, wanted) < ALLOWED[dtype] and off(final, states[:, -1]) < ALLOWED[dtype]
        assert (home[:8] == 1234).all() and (home[-8:] == 1234).all()


@pytest.mark.parametrize("rung", FUNCTIONS)
def test_without_options_and_with_views(rung):
    """The five tensors alone: views of one projection, and dt that nothing has been done to."""
    call = problem(2, 50, 4, 16, 2, 16, rest=False)
    call.pop("dt_softplus")
    call["dt"] = call["dt"].abs()
    one = torch.cat([call[name].flatten(2) for name in "xBC"], -1)
    x, B, C = one.split([64, 32, 32], -1)
    views = call | {"x": x.unflatten(-1, (4, 16)), "B": B.unflatten(-1, (2, 16)), "C": C.unflatten(-1, (2, 16))}
    wanted, _ = recurrence(**call)
    got = rung(**views, chunk_size=16)
    assert isinstance(got, torch.Tensor) and off(got, wanted) < 2e-6


@pytest.mark.parametrize("rung", FUNCTIONS)
def test_a_huge_step_leaves_the_others_their_digits(rung):
    """The sums of A dt behind it are huge, the differences between them, which count, are not."""
    call = problem(1, 64, 2, 16, 1, 16, rest=False) | {"A": torch.tensor([-16.0, -1])}
    call["dt"][0, [5, 20]] = 1e6
    y, final = rung(**call, chunk_size=32, return_final_states=True)
    wanted, states = recurrence(**call)
    for part in (slice(0, 5), slice(6, 20), slice(21, None)):
        assert off(y[:, part], wanted[:, part]) < 6e-5
    assert off(final, states[:, -1]) < 6e-5


@pytest.mark.parametrize("rung", TWO_PASSES)
@pytest.mark.parametrize("rate", [0.01, 4.0, 60.0])
def test_segments_and_early_stop_change_nothing(rung, rate):
    call = problem(1, 100, 1, 16, 1, 16) | {"A": torch.tensor([-rate])}
    wanted, states = recurrence(**call)
    for cuts in (1, 3, 7):
        for stop in (0, 64):
            y, final = rung(**call, chunk_size=16, segments=cuts, stop=stop, return_final_states=True)
            assert off(y, wanted) < 3e-6 and off(final, states[:, -1]) < 3e-6


def late(value):
    """One large token; from the end of its chunk to the end of its segment the decay of one head is 2^-67."""
    call = problem(1, 192, 2, 16, 1, 16, rest=False) | {"A": torch.tensor([-1.0, -0.2])}
    call["dt"] = torch.full_like(call["dt"], 1.4 * math.log(2))
    call["x"][:, 21:] *= 1e-3
    call["x"][:, 5] = value
    call["dt_softplus"] = False
    return call


@pytest.mark.parametrize("rung", TWO_PASSES)
def test_what_the_early_stop_would_lose_is_found(rung, monkeypatch):
    """A huge number shows through a decay of 2^-80. Without the comparison at a segment's end it would not."""
    call = late(1e30)
    wanted, _ = recurrence(**call)
    wanted = wanted[:, 64:128]  # of the second segment
    found = rung(**call, chunk_size=16, segments=3)[:, 64:128]
    assert off(found[:, :, 0], wanted[:, :, 0]) < 1e-5
    monkeypatch.setattr(segments, "far_apart", lambda true, used: 0)
    lost = rung(**call, chunk_size=16, segments=3)[:, 64:128]
    assert off(lost[:, :, 0], wanted[:, :, 0]) > 0.5


@pytest.mark.parametrize("rung", FUNCTIONS)
@pytest.mark.parametrize("name", ["x", "B", "C", "dt"])
def test_what_is_not_finite_reaches_what_it_should(rung, name):
    for value in (math.nan, math.inf) if name == "x" else (math.nan,):
        call = problem(1, 70, 2, 16, 1, 16) | {"A": torch.tensor([-30.0, -0.1])}
        call[name][:, 37].flatten()[1] = value
        wanted, states = recurrence(**call)
        more = {"segments": 3} if rung in TWO_PASSES else {}
        y, final = rung(**call, chunk_size=16, return_final_states=True, **more)
        assert (torch.isfinite(y) == torch.isfinite(wanted)).all()
        assert (torch.isfinite(final) == torch.isfinite(states[:, -1])).all()


@pytest.mark.parametrize("rung", TWO_PASSES)
def test_counters_serve_one_launch_after_another(rung, monkeypatch):
    """Nothing is zeroed in between: the ticket is back at 0, the epoch one further, and old flags are not believed."""
    kept = {}
    monkeypatch.setattr(segments, "claim", lambda _, words: kept.setdefault(words, torch.zeros(words).long()))
    for launch in range(1, 4):
        call = problem(1, 70, 2, 16, 1, 16, seed=launch)
        assert off(rung(**call, chunk_size=16, segments=3), recurrence(**call)[0]) < 2e-6
        (counters,) = kept.values()
        assert int(counters[0]) == launch << 32
        assert counters[1:3].tolist() == [0, 0]  # of each head, how many have finished
        assert counters[3:7].tolist() == 4 * [launch]  # flags of the segments that have published


def test_the_same_bits_each_time():
    call = problem(1, 40, 2, 16, 1, 16, torch.float16)
    for rung in FUNCTIONS:
        assert torch.equal(rung(**call, chunk_size=16), rung(**call, chunk_size=16))


def test_segment_count():
    for lines in (1, 2, 80, 128, 640, 100_000):
        for nchunks in (1, 3, 16, 128, 129, 4096, 1 << 20):
            count = segment_count(lines, nchunks, 132)
            assert 1 <= count <= max(1, nchunks // 4)
    assert segment_count(80, 128, 132) == 3 and segment_count(80, 2048, 132) == 13


def test_each_stream_and_each_launch_in_a_graph_has_counters_of_its_own(monkeypatch):
    class Stream:
        def __init__(self, number):
            self.cuda_stream = number

        def synchronize(self):
            pass

    class Device:
        type, index = "cuda", 0

    capturing, stream, real = False, Stream(5), torch.zeros
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(cuda_driver, "current_stream", lambda _: stream.cuda_stream)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: real(*size, dtype=dtype))
    monkeypatch.setattr(workspace, "_streams", {})
    monkeypatch.setattr(workspace, "_stores", {})
    first = workspace.claim(Device, 10)
    assert workspace.claim(Device, 10) is first and workspace.claim(Device, 11) is not first
    stream = Stream(6)
    assert workspace.claim(Device, 10) is not first
    stream = Stream(cuda_driver.PER_THREAD)  # of each thread another one
    with ThreadPoolExecutor(1) as other:
        theirs = [other.submit(workspace.claim, Device, 10).result() for _ in range(2)]
    ours = workspace.claim(Device, 10)
    assert theirs[0] is theirs[1] and workspace.claim(Device, 10) is ours and ours is not theirs[0]
    capturing = True
    pieces = [workspace.claim(Device, words) for words in (10, 10, workspace.STORE - 25, 10)]
    places = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in [first, *pieces]]
    for n, (begin, end) in enumerate(places):
        assert all(end <= other or last <= begin for other, last in places[:n] + places[n + 1 :])
    assert not any(piece.any() for piece in pieces)


# The machine code


@pytest.fixture(scope="module")
def compiled():
    """compiled(module, kernel, constants) -> (PTX for sm_90, bytes of shared memory), made where nothing is
    interpreted. For two heads of 64 columns, 64 numbers of state and chunks of 64; or one, for `published`."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        yield lambda *what: apart.submit(compile_for_hopper, *what).result()


def compile_for_hopper(module, name, constants):
    import importlib
    import warnings

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"kernels.ssd.{module}"), name)
    kinds = {"*fp16": "x dt B C y", "*fp32": "A final cb added decays", "fp32": "low high"}
    kinds["*i32" if module == "published" else "*i64"] = "counters"
    kinds["i32"] = "batch seqlen ngroups x_b x_h dt_b B_b B_g C_b C_g z_b z_h cuts"
    kinds = {name: kind for kind, names in kinds.items() for name in names.split()}
    heads = constants["nheads"]
    constants = dict.fromkeys(("D", "z", "dt_bias", "initial")) | {"SOFTPLUS": True, "D_ROWS": False} | constants
    constants |= dict.fromkeys(("B_l", "C_l", "P", "N", "WP", "WN", "Q"), 64)
    constants |= {"x_l": 64 * heads, "z_l": 64 * heads, "dt_l": heads}
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    whole = [n for n, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name in ("x_b", "x_h", "B_b")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(
            ASTSource(kernel, signature, constexprs=constants, attrs={(n,): [["tt.divisibility", 16]] for n in whole}),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4, "num_stages": 2},
        )
    return made.asm["ptx"], made.metadata.shared


@pytest.mark.parametrize("module, name", [("segments", "walk"), ("tuned", "tuned")])
def test_compiled_for_hopper_it_is_right_on_the_simt_machine(compiled, module, name):
    """Six programs that wait for each other: with no early stop, with cuts, and with a head that is walked again."""
    ptx, shared = compiled(module, name, {"nheads": 2, "STOP": 64, "SPAN": 4})
    # The machine looks for waiting loops by the name of shared memory, without its "::cta".
    machine = simt.load(ptx.replace("st.shared::cta", "st.shared"))
    kernel, seqlen, cuts = machine[machine.names[0]], 416, 3
    for rate, zeros in ((1.0, False), (16.0, False), (16.0, True)):
        rng = np.random.default_rng(13)
        shapes = (1, seqlen, 2, 64), (1, seqlen, 2), (1, seqlen, 1, 64), (1, seqlen, 1, 64)
        x, dt, B, C = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
        dt, A = (0.5 * dt - 3).astype(np.float16), np.array([-rate, -rate / 4], np.float32)
        if zeros:
            x[:, :60] = x[:, 64:] = 0
            dt[:, 128:] = -15  # what the first segment leaves out is all that there is, and it stays
        y, final, added, decays = (
            np.full(shape, np.nan, np.float32) for shape in (x.shape, (1, 2, 64, 64), (2, 2, 64, 64), (2, 2))
        )
        y, counters = y.astype(np.float16), np.zeros(1 + 2 * (1 + cuts), np.int64)
        strides = seqlen * 128, 64, seqlen * 2, seqlen * 64, 64, seqlen * 64, 64, seqlen * 128, 64
        numbers = [np.int32(1), np.int32(seqlen), np.int32(1), np.float32(0), np.float32(np.inf)]
        given = [x, dt, A, B, C, y, final, added, decays, counters, *numbers, *map(np.int32, (*strides, cuts))]
        rest = [np.uint64(0)] * (len(kernel.program.parameters) - len(given))  # Triton's own scratch memory
        kernel(2 * cuts, 128, *given, *rest, shared=shared)
        arrays = (a.astype(np.float64) for a in (x, dt, A, B, C))
        wanted, state = ref.ssd.ssd_recurrent(*arrays, dt_softplus=True)
        assert np.linalg.norm(y - wanted) < 1e-3 * np.linalg.norm(wanted)
        for head in range(2):
            assert np.linalg.norm(final[0, head] - state[0, head]) < 2e-3 * np.linalg.norm(state[0, head])
        assert (decays == -1).any() == (rate == 16)
        assert counters[0] >> 32 == 1 and not counters[1:3].any()


def barriers_before_releases(ptx):
    """For each release, how many barriers lie between it and the last store to global memory before it."""
    events = re.findall(r"st\.global|bar\.sync|atom\S*release", ptx)
    found, since = [], 0
    for event in events:
        since = 0 if event == "st.global" else since + (event == "bar.sync")
        if "release" in event:
            found.append(since)
    return found


def test_the_barrier_is_there(compiled):
    """Two releases, of C B^T and of the state. Triton 3.6 puts no barrier of its own there; 3.9 does."""
    have, lack = (
        barriers_before_releases(compiled("published", "published", {"nheads": 1, "BARRIER": barrier})[0])
        for barrier in (True, False)
    )
    assert len(have) == 2 and min(have) >= 1
    assert [one - other for one, other in zip(have, lack)] == [1, 1]


# Bad input


def test_what_is_not_supported_is_named():
    call = problem(1, 20, 2, 16, 1, 16)
    for rung in FUNCTIONS:
        name = rung.__name__
        with pytest.raises(NotImplementedError, match=f"{name}: seq_idx"):
            rung(**call, seq_idx=torch.zeros(1, 20, dtype=torch.int32))
        with pytest.raises(NotImplementedError, match=f"{name}: cu_seqlens"):
            rung(**call, cu_seqlens=torch.tensor([0, 20]))
        half = {k: v.half() if k in ("x", "dt", "B", "C", "z") else v for k, v in call.items()}
        with pytest.raises(NotImplementedError, match=f"{name}: state_dtype must be torch.float32 here"):
            rung(**half, state_dtype=torch.float16)
        with pytest.raises(ValueError, match=f"{name}: chunk_size must be a power of two"):
            rung(**call, chunk_size=48)
        with pytest.raises(ValueError, match=f"{name}: dstate must be at most 128"):
            rung(**problem(1, 20, 2, 16, 1, 130))


def test_bad_options_of_a_rung():
    call = problem(1, 100, 2, 16, 1, 16)
    with pytest.raises(ValueError, match="blocks must be from 1 to 16 and divide headdim, 16, got 3"):
        fused_registers(**call, blocks=3)
    for cuts in (0, 8):
        with pytest.raises(ValueError, match=f"segments must be from 1 to 7, got {cuts}"):
            fused_segments(**call, chunk_size=16, segments=cuts)
    with pytest.raises(TypeError, match="segments must be a whole number or None, got 2.5"):
        fused_tuned(**call, chunk_size=16, segments=2.5)
    for stop in (-1, "64"):
        with pytest.raises((TypeError, ValueError), match="stop must be"):
            fused_tuned(**call, chunk_size=16, stop=stop)


def test_blocks_of_a_head():
    call = problem(1, 40, 2, 24, 1, 16)
    wanted, states = recurrence(**call)
    for blocks in (1, 2, 3):
        y, final = fused_registers(**call, chunk_size=16, blocks=blocks, return_final_states=True)
        assert off(y, wanted) < 2e-6 and off(final, states[:, -1]) < 2e-6


def test_sources_are_there():
    root = Path(__file__).resolve().parent.parent
    assert [rung.function for rung in RUNGS] == [fused_published, fused_overlap, fused_registers, *TWO_PASSES]
    assert all((root / source).is_file() for rung in RUNGS for source in rung.sources)
