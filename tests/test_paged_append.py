"""kernels/paged/append.cu on the SIMT machine: new tokens, and tokens that are shared, over hostile pages."""

import functools

import pytest
import torch

from kernels.paged import decoding
from kernels.paged.appending import append_tensors, shared_tensors, why_not
from tests.paged_append_cases import append_error, error, pool, shared_error

HALF, BFLOAT = torch.float16, torch.bfloat16
TEAMS = {"team": 2}
WITHIN = {HALF: 1e-3, BFLOAT: 6e-3}


@pytest.mark.parametrize(
    ("lens", "new", "group", "n_kv_heads", "head_dim", "page_size", "dtype", "chosen", "options"),
    [
        # one past a step, fewer tokens than queries, none, nobody; more units than blocks
        ([129, 3, 0, None], 7, 4, 1, 64, 8, HALF, {"blocks": 2, "whole": True, "rows": 128}, {"check_races": True}),
        # teams, a last tile without rows for one of its blocks, and for one of another's warpgroups
        ([300], 67, 4, 1, 64, 16, HALF, {"blocks": 2, "whole": True, **TEAMS}, {"check_races": True}),
        ([9, 300], 41, 8, 1, 64, 64, HALF, {"blocks": 6, "whole": False, **TEAMS}, {}),
        # units in a line, cut where shares end, and a group that fills no tile
        ([1, 257], 20, 7, 1, 128, 16, BFLOAT, {"blocks": 5, "whole": False}, {"order": "reverse"}),
        # more parts of a unit than the merge loads at once; a tile of 64 rows for both warpgroups
        ([700, 65], 2, 8, 1, 64, 64, HALF, {"blocks": 9, "whole": False, "rows": 64}, {}),
        ([128], 2, 1, 1, 64, 64, HALF, {"blocks": 1, "whole": True, "rows": 64}, {"check_races": True}),
        # a block's eighth segment, when its ring of four is where it began, is the first part of a unit
        ([5] * 7 + [1100], 1, 1, 1, 64, 64, HALF, {"blocks": 2, "whole": False, "rows": 64}, {}),
    ],
)
def test_append(lens, new, group, n_kv_heads, head_dim, page_size, dtype, chosen, options):
    sizes = new, group, n_kv_heads, head_dim, page_size, dtype
    assert append_error(lens, *sizes, options=options, **chosen) < WITHIN[dtype]


EVERYONE = list(range(40))


@pytest.mark.parametrize(
    ("items", "group", "head_dim", "page_size", "chosen", "options"),
    [
        # what teams take together, then what each block takes alone; levels of one request, another's, one query
        # twice in a run, a run behind the request's end
        (
            [(0, 0, 256, EVERYONE), (1, 64, 999, [5, 3]), (0, 256, 37, [3, 3, 1])],
            4, 64, 16, {"blocks": 4}, {},
        ),
        # more shares of a unit
        ([(0, 0, 290, EVERYONE), (1, 64, 130, [5, 3])], 4, 64, 16, {"blocks": 6}, {"order": "reverse"}),
        # a team that has some of both
        ([(0, 0, 128, EVERYONE[:36]), (1, 0, 200, [1])], 4, 64, 32, {"blocks": 2, "rows": 128},
         {"check_races": True}),
        ([(0, 0, 293, EVERYONE[:9]), (1, 192, 8, [1])], 1, 64, 8, {"blocks": 3, "rows": 64}, {"order": "reverse"}),
    ],
)  # fmt: skip
def test_shared(items, group, head_dim, page_size, chosen, options):
    sizes = len(EVERYONE), group, 1, head_dim, page_size, HALF
    assert shared_error([293, 200], items, *sizes, options=options, **chosen) < WITHIN[HALF]


def test_shared_without_tokens():
    """What is left of an item whose request is gone takes part in no merge: a weight of 0."""
    k, v, table, lens, slots = pool([100], 1, 64, 8, HALF, "cpu", 0)
    q = torch.ones(1, 1, 64, dtype=HALF)
    lens[slots[0]] = 16
    as_int = functools.partial(torch.tensor, dtype=torch.int32)
    run = as_int([[int(slots[0]), 16, 64, 0, 1], [-1, 0, 64, 1, 1]])
    given = q, k, v, table, lens, run, as_int([2]), as_int([0, 0]), as_int([[0, -1, 1]])
    assert not shared_tensors(*given, chosen={"blocks": 1, "rows": 64}).any()


@pytest.mark.parametrize("invariant", [False, True])
def test_an_output_at_a_multiple_of_eight_bytes(invariant):
    """append.cu writes 16 bytes at a time: who gives a place for 8 has decode.cu's rows."""
    k, v, table, lens, slots = pool([130], 1, 64, 16, HALF, "cpu", 0)
    q = torch.randn(1, 17, 4, 64, generator=torch.Generator().manual_seed(1)).to(HALF)
    out = torch.empty(q.numel() + 4, dtype=HALF)[4:].view(q.shape)
    assert out.data_ptr() % 16 == 8
    decoding.append_tensors(q, k, v, table, lens, slots, out=out, invariant=invariant)
    assert error(out, decoding.append_tensors(q, k, v, table, lens, slots).double()) < WITHIN[HALF]
    with pytest.raises(ValueError, match="append_attention: out must start at an address divisible by 16, got 0x"):
        append_tensors(q, k, v, table, lens, slots, out=out)


def test_refusals():
    k, v, table, lens, slots = pool([20], 1, 64, 16, HALF, "cpu", 0)
    q = torch.zeros(1, 2, 3, 64, dtype=HALF)
    with pytest.raises(ValueError, match=r"append_attention: scale must be positive, got -1\.0"):
        append_tensors(q, k, v, table, lens, slots, scale=-1.0)
    with pytest.raises(ValueError, match=r"decode: items must have shape \(n_items, 5\)"):
        shared_tensors(q[0], k, v, table, lens, slots, slots, slots, slots)
    assert why_not(q, torch.zeros(2, 1, 16, 80, dtype=HALF)).startswith("head_dim must be 64 or 128, got 80")
    assert why_not(q, torch.zeros(2, 1, 4, 64, dtype=HALF)).startswith("page_size must be one of 8, 16, 32, 64, got 4")
