"""fused.cu with several sequences in a row of tokens, on the SIMT machine: nothing goes from one to the next."""

import math

import pytest
import torch
from test_ssd_five import off, recurrence
from test_ssd_fused import ALLOWED, BF16, HALF, MODULE, launched, problem, run, simple  # noqa: F401, a fixture

from kernels.ssd import fused, mamba_chunk_scan_combined
from kernels.ssd.five import sequence_numbers
from kernels.ssd.fused import counters

HOSTILE = [  # where sequences begin
    (1,), (15, 16, 17), (63,), (64,), (65, 128), (31, 33, 34, 90, 127, 129), tuple(range(1, 140)), (),
]  # fmt: skip


def numbers(seqlen, *begins):
    """seq_idx of sequences that begin there."""
    return torch.bucketize(torch.arange(seqlen), torch.tensor([*begins, seqlen]), right=True).int()[None]


def slow_and_fast(seqlen, nheads=2, **sizes):
    """In the first head A dt is next to 0: whatever leaks over a place where a sequence begins is there to the end."""
    return simple(seqlen, nheads, **sizes) | {"A": torch.linspace(-1e-6, -1, nheads)}


def right(call, seq_idx, dtype=HALF, **options):
    """Runs it, between poisoned guards, and looks at each sequence by itself, too: a small one hides in the whole."""
    y, final = run(call | {"seq_idx": seq_idx}, dtype, **options)
    wanted, _ = recurrence(**call, seq_idx=seq_idx)
    for found, right, own in zip(y, wanted, seq_idx):
        for number in own.unique():
            assert off(found[own == number], right[own == number]) < 5 * ALLOWED[dtype]
    return y, final


@pytest.mark.parametrize("processors", [8, 40])  # pieces of whole rows; or of half a chunk to a chunk
def test_sequences_do_not_meet(launched, processors):  # noqa: F811
    """Each row of the batch has sequences of its own."""
    launched(processors=processors, sort=0)
    call = slow_and_fast(140, batch=len(HOSTILE))
    call["initial_states"] = torch.randn(len(HOSTILE), 2, 64, 64)
    right(call, torch.cat([numbers(140, *begins) for begins in HOSTILE]))


def test_an_early_stop_changes_nothing_and_looks_no_further_than_a_sequence(launched, counted):  # noqa: F811
    launched(processors=4, sort=0)
    call, seq_idx = slow_and_fast(200), numbers(200, 75, 130)
    y, final = right(call, seq_idx)
    again, same = right(call, seq_idx, stop=0)
    assert torch.equal(y, again) and torch.equal(final, same)
    # With a sequence for each token pass 1 ends in the chunk that it begins with, by products that are no wgmma.
    whole, cut = (counters(**call, seq_idx=numbers(200, *begins)) for begins in ((), range(1, 200)))
    passed = whole.counters["simt__wgmma.sum"] - cut.counters["simt__wgmma.sum"]
    assert passed == 3 * 2 * 4  # three chunks, two rows, four products


def test_no_race(launched):  # noqa: F811
    """And none where products are made again, as something was not finite."""
    launched(processors=2, sort=1)
    call = slow_and_fast(90)
    call["B"][0, 70, 0, 3] = math.nan
    counters(**call, seq_idx=numbers(90, 5, 72), check_races=True)


def test_what_is_not_finite_stays_in_its_sequence(launched):  # noqa: F811
    """In a chunk of its own, and in one with other sequences, in front and behind; in pass 1, too."""
    launched(processors=3, sort=0)
    call, seq_idx = slow_and_fast(160) | {"D": torch.ones(2)}, numbers(160, 70, 80, 88, 141, 150)
    clean, last = fused(**call, seq_idx=seq_idx, return_final_states=True)
    changed, expected = dict(call), torch.zeros(clean.shape, dtype=torch.bool)
    for name, where, bad, reached in (
        ("B", (0, 10, 0, 3), math.nan, (slice(10, 70),)),
        ("dt", (0, 71, 0), math.inf, (slice(71, 80), 0)),
        ("x", (0, 75, 1, 5), math.nan, (slice(75, 80), 1, 5)),
        ("B", (0, 82, 0, 3), math.inf, (slice(82, 88),)),
        ("dt", (0, 140, 1), math.nan, (140, 1)),
        ("x", (0, 149, 0, 63), math.inf, (149, 0, 63)),
        ("C", (0, 155, 0, 3), math.nan, (155,)),
    ):
        changed[name] = changed[name].clone()
        changed[name][where] = bad
        expected[(0, *reached)] = True
    y, final = fused(**changed, seq_idx=seq_idx, return_final_states=True)
    assert torch.equal(~y.isfinite(), expected)
    assert torch.allclose(y[~expected], clean[~expected], rtol=2e-3, atol=2e-3)
    assert torch.allclose(final, last, rtol=1e-3, atol=1e-3)


def test_a_state_too_large_for_16_bits_stays_in_its_sequence(launched):  # noqa: F811
    launched(processors=1)
    call = slow_and_fast(90)
    call["x"][:, :40] *= 1e4
    seq_idx = numbers(90, 66)
    wanted, states = recurrence(**call, seq_idx=seq_idx)
    y, final = fused(**call, seq_idx=seq_idx, return_final_states=True)
    assert not y[:, 64:66].isfinite().all()  # C times the state: infinite in float16
    assert off(y[:, 66:], wanted[:, 66:]) < ALLOWED[HALF] and off(final, states[:, -1]) < ALLOWED[HALF]


def test_the_states_at_the_ends_of_sequences(launched):  # noqa: F811
    """Ends in any place of a chunk, sequences within one and over several, and empty ones; with all options, in
    bfloat16, a pair of one row, and tiles that are not full."""
    launched(processors=4)
    call = problem(1, 215, 3, 80, 1, 16, BF16) | {"A": torch.full((3,), -1e-6)}
    cu_seqlens = torch.tensor([0, 0, 13, 40, 40, 64, 128, 129, 130, 192, 200, 215, 215])
    poison = torch.full((len(cu_seqlens) * 3 * 80 * 16,), torch.nan)  # freed memory that may come back
    del poison
    y, final, ends = fused(**call, cu_seqlens=cu_seqlens, return_final_states=True, return_varlen_states=True)
    wanted, states = recurrence(**call, seq_idx=sequence_numbers(cu_seqlens, 215))
    assert off(y, wanted) < ALLOWED[BF16] and off(final, states[:, -1]) < ALLOWED[BF16]
    assert ends.dtype is torch.float32 and ends.shape == (len(cu_seqlens) - 1, 3, 80, 16)
    for found, begin, end in zip(ends, cu_seqlens, cu_seqlens[1:]):
        assert off(found, states[0, end - 1]) < ALLOWED[BF16] if end > begin else not found.any()
    assert torch.equal(y, fused(**call, cu_seqlens=cu_seqlens.int()))


def test_as_mamba_ssm_calls_it(launched):  # noqa: F811
    """seq_idx with numbers of its own beside cu_seqlens, which counts only for the states."""
    launched(processors=2)
    call, cu_seqlens = simple(100, 2), torch.tensor([0, 30, 100])
    seq_idx = sequence_numbers(cu_seqlens, 100) * 5 + 3
    y, ends = mamba_chunk_scan_combined(
        **call, chunk_size=256, seq_idx=seq_idx, cu_seqlens=cu_seqlens, return_varlen_states=True
    )
    wanted, states = recurrence(**call, seq_idx=seq_idx)
    assert off(y, wanted) < ALLOWED[HALF] and off(ends, states[0, [29, 99]]) < ALLOWED[HALF]


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"seq_idx": torch.zeros(1, 70, dtype=torch.int64)}, TypeError, "seq_idx must be of torch.int32"),
        ({"seq_idx": torch.zeros(1, 69, dtype=torch.int32)}, ValueError, r"seq_idx must have shape \(1, 70\)"),
        ({"seq_idx": torch.zeros(1, 140, dtype=torch.int32)[:, ::2]}, ValueError, "seq_idx must be contiguous"),
        ({"seq_idx": torch.zeros(1, 70, dtype=torch.int32, device="meta")}, ValueError, "seq_idx must be on cpu"),
        ({"seq_idx": numbers(70, 9).flip(1)}, ValueError, "seq_idx must never fall"),
        ({"seq_idx": [0] * 70}, TypeError, "seq_idx must be a dense torch tensor"),
        ({"cu_seqlens": torch.tensor([1, 70])}, ValueError, "from 0 to seqlen, 70.* got 1 to 70"),
        ({"cu_seqlens": torch.tensor([0, 60])}, ValueError, "got 0 to 60"),
        ({"cu_seqlens": torch.tensor([0, 40, 30, 70])}, ValueError, "never fall, got 0 to 70, falling"),
        ({"cu_seqlens": torch.tensor([0.0, 70.0])}, TypeError, "cu_seqlens must be of"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, "2 elements or more"),
        ({"cu_seqlens": torch.tensor([[0, 70]])}, ValueError, "cu_seqlens must have shape"),
        ({"cu_seqlens": torch.tensor([0, 30, 70]), "seq_idx": numbers(70, 31)}, ValueError, r"got \[31\] and \[30\]"),
        ({"return_varlen_states": True, "seq_idx": numbers(70, 31)}, ValueError, "needs cu_seqlens"),
    ],
)  # fmt: skip
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        fused(**(simple(70, 2) | change))


@pytest.mark.parametrize("name, dtype", [("seq_idx", torch.int32), ("cu_seqlens", torch.int64)])
def test_out_has_memory_of_its_own(name, dtype):
    home = torch.zeros(1, 70, 2, 64, dtype=HALF)
    words = home.view(-1).view(dtype)
    given = {"seq_idx": words[:70].view(1, 70), "cu_seqlens": words[:2]}
    if name == "cu_seqlens":
        words[1] = 70
    before = home.clone()
    with pytest.raises(ValueError, match=f"out must not share memory with {name}, got"):
        fused(**simple(70, 2), **{name: given[name]}, out=home)
    assert torch.equal(home, before)


def test_a_batch_has_no_cu_seqlens():
    with pytest.raises(ValueError, match="cu_seqlens needs a batch of 1"):
        fused(**simple(70, 2, batch=2), cu_seqlens=torch.tensor([0, 70]))
