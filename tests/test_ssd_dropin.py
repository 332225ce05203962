"""mamba_chunk_scan_combined: mamba_ssm's signature, passed on to the best rung."""

import inspect
import math

import pytest
import torch
from test_ssd_five import off, problem, recurrence

from kernels.ssd import dropin, mamba_chunk_scan_combined
from kernels.ssd.five import five, sequence_numbers

SIGNATURE = {  # of mamba_ssm 2.3
    "x": None, "dt": None, "A": None, "B": None, "C": None, "chunk_size": None, "D": None, "z": None, "dt_bias": None,
    "initial_states": None, "seq_idx": None, "cu_seqlens": None, "dt_softplus": False, "dt_limit": (0.0, math.inf),
    "return_final_states": False, "return_varlen_states": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def by_five(monkeypatch):
    monkeypatch.setattr(dropin, "fused", five)


def test_the_signature():
    found = inspect.signature(mamba_chunk_scan_combined).parameters
    assert list(found) == list(SIGNATURE)
    for name, parameter in list(found.items())[6:]:
        assert parameter.default == SIGNATURE[name] and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def test_by_position_and_by_name():
    call = problem(1, 40, 2, 16, 1, 16)
    wanted, states = recurrence(**call)
    names = "x dt A B C".split(), "D z dt_bias initial_states".split()
    first, second = ([call[name] for name in part] for part in names)
    y = mamba_chunk_scan_combined(*first, 16, *second, None, None, True, (0.01, 0.5))
    assert off(y, wanted) < 1e-6
    again, final = mamba_chunk_scan_combined(**call, chunk_size=32, return_final_states=True)
    assert off(again, wanted) < 1e-6 and off(final, states[:, -1]) < 1e-6


def test_cu_seqlens_counts_only_for_the_states_of_sequences():
    call, cu_seqlens = problem(1, 40, 2, 16, 1, 16), torch.tensor([0, 15, 40])
    y = mamba_chunk_scan_combined(**call, chunk_size=16, cu_seqlens=cu_seqlens)
    assert torch.equal(y, five(**call, chunk_size=16))
    y, final, ends = mamba_chunk_scan_combined(
        **call, chunk_size=16, cu_seqlens=cu_seqlens, return_final_states=True, return_varlen_states=True
    )
    wanted, states = recurrence(**call, seq_idx=sequence_numbers(cu_seqlens, 40))
    assert off(y, wanted) < 1e-6 and off(ends, states[0, [14, 39]]) < 1e-6 and torch.equal(final[0], ends[1])
    with pytest.raises(ValueError, match="return_varlen_states needs cu_seqlens"):
        mamba_chunk_scan_combined(**call, chunk_size=16, return_varlen_states=True)


def test_what_lies_across_is_copied():
    """As it comes out of a convolution along the sequence."""
    call = problem(1, 40, 2, 16, 1, 16)
    wanted = mamba_chunk_scan_combined(**call, chunk_size=16)
    for name in ("x", "B", "C", "z", "dt"):
        call[name] = call[name].transpose(1, -1).contiguous().transpose(1, -1)
    assert call["x"].stride(-1) != 1
    assert torch.equal(mamba_chunk_scan_combined(**call, chunk_size=16), wanted)


def test_strides_that_mamba_ssm_takes():
    call = problem(2, 40, 4, 16, 2, 16) | {"D": torch.randn(1).expand(4), "seq_idx": torch.arange(40).int() // 17}
    call["seq_idx"] = call["seq_idx"].expand(2, 40)
    plain = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    wanted = mamba_chunk_scan_combined(**plain, chunk_size=16)
    call["A"] = call["A"].repeat_interleave(2)[::2]
    call["initial_states"] = call["initial_states"].mT.contiguous().mT
    call["seq_idx"] = call["seq_idx"].long()
    assert torch.equal(mamba_chunk_scan_combined(**call, chunk_size=16), wanted)


def test_what_is_wrong_is_named():
    call = problem(1, 20, 2, 16, 1, 16)
    with pytest.raises(TypeError, match="x must be a dense torch tensor, got None|x must be"):
        mamba_chunk_scan_combined(**call | {"x": None}, chunk_size=16)
    with pytest.raises(ValueError, match="chunk_size must be a power of two"):
        mamba_chunk_scan_combined(**call, chunk_size=100)
