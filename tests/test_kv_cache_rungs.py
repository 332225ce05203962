"""Chapter 07's mix over a cache of 16 bits, on the SIMT machine: right on hostile shapes, the counters and the machine
code that the chapter states, no race, and an error before anything is written for what the contract does not allow."""

import re
import sys

import numpy as np
import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand
from hypothesis import given, settings
from hypothesis import strategies as some

from kernels.kv_cache import rungs
from lab import cuda
from lab.cuda import disassembly
from ref.attention import attention_mix

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

NAMES = [rung.name for rung in rungs.RUNGS]
# n_heads, n_kv_heads, kv_len, head_dim
SHAPES = [(6, 2, 37, 34), (1, 1, 1, 2), (4, 4, 1, 128), (8, 1, 257, 64), (2, 1, 31, 8), (3, 3, 33, 256), (2, 2, 97, 30)]
LONG = [(4, 1, 1024, 32), (2, 2, 2049, 8), (1, 1, 3001, 4)]  # whole batches of mix_flight, and one token more
REQUESTS, SECTORS = ("l1tex__t_" + what + "_pipe_lsu_mem_global_op_{}.sum" for what in ("requests", "sectors"))


def run(name, *args, **options):
    return getattr(rungs, name)(*args, **options)


def dtype_of(name):
    return torch.float32 if name == "mix_fp32" else torch.float16


def problem(name, n_heads, n_kv_heads, kv_len, head_dim, skip=0):
    """att and v between NaNs, out full of NaN between fences."""
    rng = torch.Generator().manual_seed(1000 * kv_len + head_dim)
    att = torch.randn(n_heads, kv_len, generator=rng)
    v = torch.randn(kv_len, n_kv_heads, head_dim, generator=rng).to(dtype_of(name))
    out = between(torch.full((n_heads, head_dim), torch.nan), FENCE)
    return between(att), between(v, skip=skip), out


def close(out, att, v):
    wanted = attention_mix(att.numpy(), v.float().numpy())
    size = attention_mix(att.abs().numpy(), v.abs().float().numpy())
    assert np.linalg.norm(out.double().numpy() - wanted) <= 1e-6 * np.linalg.norm(size)


# Right


@pytest.mark.parametrize("name", NAMES)
def test_right_on_hostile_shapes(name):
    for shape in SHAPES + LONG:
        att, v, out = problem(name, *shape)
        before = att.clone(), v.clone()
        assert run(name, att, v, out=out) is out
        close(out, att, v)
        assert fences_stand(out)
        assert torch.equal(att, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("name", ["mix_fp32", "mix_fp16", "mix_flight"])
def test_odd_heads(name):
    for shape in ((3, 1, 41, 1), (2, 2, 35, 33), (1, 1, 70, 5)):
        att, v, out = problem(name, *shape)
        close(run(name, att, v, out=out), att, v)
        assert fences_stand(out)


@pytest.mark.parametrize("skip", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_any_alignment(name, skip):
    att, v, out = problem(name, 4, 2, 300, 40, skip)
    if name == "mix_half2" and skip % 2:
        with pytest.raises(ValueError, match="mix_half2: v must start at an address divisible by 4, got 0x"):
            run(name, att, v, out=out)
        assert out.isnan().all()
    else:
        close(run(name, att, v, out=out), att, v)


@given(
    n_kv_heads=some.integers(1, 3), group=some.integers(1, 3), kv_len=some.integers(1, 300), half=some.integers(1, 40)
)
@settings(max_examples=12, deadline=None)
def test_any_shape(n_kv_heads, group, kv_len, half):
    for name in NAMES:
        att, v, out = problem(name, group * n_kv_heads, n_kv_heads, kv_len, 2 * half)
        close(run(name, att, v, out=out), att, v)
        assert fences_stand(out)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_stay_where_they_are(name):
    att, v, out = problem(name, 4, 2, 70, 36)
    v[69, 0, 35], v[3, 1, 0] = torch.nan, torch.inf
    att.abs_()
    run(name, att, v, out=out)
    assert out[:2, 35].isnan().all() and (out[2:, 0] == torch.inf).all()
    assert out[:2, :35].isfinite().all() and out[2:, 1:].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_without_out_a_new_tensor_comes_back(name):
    att, v, _ = problem(name, 2, 1, 9, 16)
    y = run(name, att, v)
    assert y.shape == (2, 16) and y.dtype == torch.float32 and y.is_contiguous() and not y.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_no_race(name):
    for shape in ((2, 1, 300, 64), (2, 2, 1025, 24)):
        att, v, _ = problem(name, *shape)
        rungs.counters(name, att, v, check_races=True)


# Counters: what the chapter states


def counted(name, kv_len=4096, heads=(4, 1), head_dim=64):
    att, v, _ = problem(name, *heads, kv_len, head_dim)
    report = rungs.counters(name, att, v)
    return report.counters[REQUESTS.format("ld")], report.counters[SECTORS.format("ld")], report


def test_requests_and_sectors():
    blocks, kv_len = 4 * 2, 4096
    loads = blocks * kv_len  # of v and of att each, with a token for each request
    assert counted("mix_fp32")[:2] == (2 * loads, loads * (4 + 1))
    assert counted("mix_fp16")[:2] == (2 * loads, loads * (2 + 1))
    assert counted("mix_half2")[:2] == (loads, loads // 2 * (4 + 1))
    assert counted("mix_flight")[:2] == (loads // 4, loads // 8 * (16 + 1))


def test_all_rungs_have_one_grid_and_no_bank_conflicts():
    for name in NAMES:
        report = counted(name, 512)[2]
        assert report.grid == (4, 2, 1) and report.block == (32, 32, 1) and report.bank_conflicts == 0
        assert report.sectors_per_request("st") == 4


# Machine code: what the chapter shows


def module(name, *options):
    return cuda.load(rungs.HERE / f"{name}.cu", options)


def loads(name, *options):
    """The loads and multiply-adds in order: L for a load of v, . for a multiply-add (loads of att are left out)."""
    try:
        code = module(name, *options).sass("mix")
    except RuntimeError:  # no disassembler here
        pytest.skip("no disassembler")
    return re.findall(r"LDG\.E[.\w]*|FFMA", code)


def test_the_words_in_the_machine_code():
    assert {"LDG.E.U16", "LDG.E"} == {op for op in loads("mix_fp16") if "LDG" in op}  # v, att
    assert (
        {"LDG.E"} == {op for op in loads("mix_fp32") if "LDG" in op} == {op for op in loads("mix_half2") if "LDG" in op}
    )
    assert {"LDG.E.128", "LDG.E"} == {op for op in loads("mix_flight") if "LDG" in op}
    assert "LDG.E.64" in loads("mix_flight", "-DVEC=4")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_spills_and_a_block_fits(name):
    for options in ((),) if name != "mix_flight" else ((), ("-DVEC=4",), ("-DVEC=2",), ("-DVEC=1",)):
        found = module(name, *options).resources()["mix"]
        assert found["registers"] <= 64 and found["spill_loads"] == found["spill_stores"] == 0


def test_half_the_registers_put_fewer_loads_in_flight():
    """What the second number of __launch_bounds__ does: loads before the first multiply-add of the longest run."""

    def together(name, *options):
        operations = "".join("." if op == "FFMA" else "L" for op in loads(name, *options))
        return max(map(len, re.findall("L+", operations)))

    for name in ("mix_fp32", "mix_fp16", "mix_half2"):
        assert together(name) >= 32 > together(name, "-DBLOCKS=2"), name  # 16 of v and 16 of att
    assert disassembly.find_tool()


# Bad input


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_argument(name):
    att, v, out = problem(name, 4, 2, 9, 8)
    other = v.half() if name == "mix_fp32" else v.float()
    cases = [
        (lambda: run(name, att.numpy(), v), TypeError, "att must be a torch tensor, got ndarray"),
        (lambda: run(name, att.half(), v), TypeError, "att must be of torch.float32, got torch.float16"),
        (lambda: run(name, att, other), TypeError, f"v must be of {v.dtype}, got {other.dtype}"),
        (lambda: run(name, att, v[:8]), ValueError, r"v must have shape \(9, n_kv_heads, head_dim\)"),
        (lambda: run(name, att[:, :0], v[:0]), ValueError, r"att must have shape .* got \(4, 0\)"),
        (
            lambda: run(name, att[:3].contiguous(), v),
            ValueError,
            "n_heads must be a multiple of n_kv_heads, got 3 query",
        ),
        (
            lambda: run(name, att, v.transpose(0, 1).contiguous().transpose(0, 1)),
            ValueError,
            "v must be contiguous",
        ),
        (lambda: run(name, att, v, out=out[:3]), ValueError, r"out must have shape \(4, 8\)"),
        (lambda: run(name, att, v, out=out.half()), TypeError, "out must be of torch.float32"),
        (lambda: run(name, att, v, out=att.view(-1)[:32].view(4, 8)), ValueError, "out must not share memory with att"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    assert out.isnan().all() and fences_stand(out)


def test_half2_needs_pairs():
    att, v, out = problem("mix_half2", 2, 1, 9, 7)
    with pytest.raises(ValueError, match="mix_half2: head_dim must be even, got 7"):
        rungs.mix_half2(att, v, out=out)
    assert out.isnan().all()


def test_counters_need_the_name_of_a_rung():
    att, v, _ = problem("mix_fp32", 2, 1, 9, 8)
    with pytest.raises(ValueError, match="counters: rung must be one of mix_fp32, .*, got 'fp32'"):
        rungs.counters("fp32", att, v)


def test_work_counts_each_byte_once():
    att, v, _ = problem("mix_half2", 4, 2, 9, 8)
    assert rungs.work(att, v) == (4 * 36 + 2 * 144 + 4 * 32, 2 * 4 * 9 * 8)


def test_words_follow_the_address_and_the_head():
    for head_dim, skip, width in ((8, 0, 8), (8, 4, 4), (12, 0, 4), (6, 0, 2), (8, 2, 2), (8, 1, 1), (5, 0, 1)):
        _, v, _ = problem("mix_flight", 1, 1, 3, head_dim, skip)
        assert rungs.words(v) == width
