"""The backward's first rung, by torch's own products: hostile calls against float64, memory, bad input."""

import sys

import pytest
import torch
from ssd_backward_cases import CASES, Poisoned, check, make

from kernels import ssd_backward

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHORT = 1, 20, 2, 16, 1, 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_plain_on_hostile_calls(name, dtype):
    check(ssd_backward.plain, name, dtype, again=dtype is torch.float16)


@pytest.mark.parametrize("most", [1, 3 * 2 * 64**2, 1 << 20])
def test_plain_takes_heads_as_memory_allows(most, monkeypatch):
    monkeypatch.setattr(sys.modules["kernels.ssd_backward.plain"], "MOST", most)
    check(ssd_backward.plain, "groups", torch.float32, chunk_size=64)
    check(ssd_backward.plain, "three chunks, odd heads", torch.float32, chunk_size=16)


def test_bad_input_of_a_rung():
    dy, call = make(SHORT, dtype=torch.float32)
    for change, error, message in (
        (dict(dy=dy[:, 1:]), ValueError, r"plain: dy must have shape \(1, 20, 2, 16\)"),
        (dict(dy=dy.half()), TypeError, "plain: dy must be of torch.float32, got torch.float16"),
        (dict(dy=None), TypeError, "plain: dy must be a dense torch tensor, got None"),
        (dict(dy=dy.mT.contiguous().mT), ValueError, "plain: dy must be contiguous along its last axis"),
        (dict(dfinal_states=call["dfinal_states"].mT), ValueError, "plain: dfinal_states must be contiguous"),
        (dict(dfinal_states=dy), ValueError, r"plain: dfinal_states must have shape \(1, 2, 16, 16\)"),
        (dict(chunk_size=100), ValueError, "plain: chunk_size must be a power of two"),
        (dict(A=call["A"].double()), TypeError, "plain: A must be of torch.float32"),
    ):
        with pytest.raises(error, match=message):
            ssd_backward.plain(**{"dy": dy} | call | change)


def test_poison_is_seen():
    """The tests' own tool: what is not written is NaN."""
    with Poisoned():
        assert torch.empty(3).isnan().all() and torch.empty(2, 2).new_empty(3).isnan().all()
        assert torch.empty_like(torch.ones(3)).isnan().all()
