"""The answers to exercises 4 and 5 of chapter 07 as rungs: right on hostile shapes, each value once, sums in order."""

import sys

import pytest
import torch
from guarded_tensors import fences_stand
from test_attention_mix import DTYPES, REQUESTS, SHAPES, close, problem

from kernels.attention import mix, mix_answers

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

NAMES = [rung.name for rung in mix_answers.RUNGS]
each = pytest.mark.parametrize("rung", mix_answers.RUNGS, ids=NAMES)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_on_hostile_shapes(rung, dtype):
    for shape in SHAPES if dtype == torch.float32 else SHAPES[:3]:
        att, v, out = problem(*shape, dtype)
        assert rung.function(att, v, out=out) is out
        close(out, att, v)
        assert fences_stand(out)
    assert rung.function(att, v).equal(out)  # the same bits, into a tensor of its own


@each
def test_no_token_is_lost(rung):
    for kv_len in (1, 2, 7, 8, 9, 31, 32, 33, 63, 65, 97, 129):
        att, v = torch.ones(2, kv_len), torch.zeros(kv_len, 1, 2)
        v[:, 0, 0], v[:, 0, 1] = torch.arange(kv_len) + 1, 1
        assert rung.function(att, v).tolist() == [[kv_len * (kv_len + 1) // 2, kv_len]] * 2, kv_len


def test_each_value_is_loaded_once_for_all_heads_and_nothing_is_added_by_atomics():
    att, v, _ = problem(4, 256, 1, 128)
    loads = {name: [r.counters[REQUESTS.format("ld")] for r in mix_answers.reports(name, att, v)] for name in NAMES}
    products = 4 * 128 * 256 // 32
    pieces = mix_answers.splits("mix_group_ordered", 4, 1, 256, 128)
    assert pieces == 256 // 32 == mix_answers.splits("mix_ordered", 4, 1, 256, 128)
    assert loads["mix_ordered"] == [2 * products, 4 * 128 // 32 * pieces]  # a share and a value for each product
    assert loads["mix_group"] == [products + products // 4]
    assert loads["mix_group_ordered"] == [products + products // 4, 4 * 128 // 32 * pieces]
    for name in NAMES:
        for report in mix_answers.reports(name, att, v, check_races=True):
            assert report.bank_conflicts == 0
            assert report.counters[REQUESTS.format("red")] == report.counters[REQUESTS.format("atom")] == 0


def test_partial_sums_are_added_in_the_order_of_the_blocks():
    att, v = torch.ones(1, 96), torch.zeros(96, 1, 1)
    v[0, 0, 0], v[40, 0, 0], v[95, 0, 0] = 1, 2.0**24, -(2.0**24)  # (1 + 2^24) - 2^24 is 0; in another order it is 1
    for rung in (mix_answers.RUNGS[0], mix_answers.RUNGS[2]):
        assert rung.function(att, v).item() == 0
    v[0, 0, 0], v[40, 0, 0], v[95, 0, 0] = 2.0**24, -(2.0**24), 1
    for rung in (mix_answers.RUNGS[0], mix_answers.RUNGS[2]):
        assert rung.function(att, v).item() == 1


@each
def test_bad_input_is_refused_by_name(rung):
    att, v, out = problem(4, 5, 2, 3)
    for arguments, message in (
        ((att, v[:4]), rf"{rung.name}: v must have shape \(5, n_kv_heads, head_dim\)"),
        ((att[:3].contiguous(), v), f"{rung.name}: n_heads must be a multiple of n_kv_heads, got 3 query heads"),
    ):
        with pytest.raises(ValueError, match=message):
            rung.function(*arguments, out=out)
    assert out.isnan().all()
    if rung.name != "mix_ordered":
        att, v, out = problem(33, 2, 1, 3)
        with pytest.raises(ValueError, match=f"{rung.name}: at most 32 query heads for each kv head, got 33 and 1 kv"):
            rung.function(att, v, out=out)
        close(rung.function(att[:32].contiguous(), v), att[:32], v)
    with pytest.raises(ValueError, match="reports: rung must be one of mix_ordered, mix_group, mix_group_ordered, got"):
        mix_answers.reports("mix_shared", att, v)


def test_the_bench_times_them_after_the_rungs_of_the_chapter():
    names = [rung.name for rung in (*mix.RUNGS, *mix_answers.RUNGS)]
    assert len(set(names)) == len(names) == 6
    assert all(source.endswith((".cu", ".py")) for rung in mix_answers.RUNGS for source in rung.sources)
