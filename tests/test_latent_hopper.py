"""kernels/latent/hopper.cu on the SIMT machine: ragged sequences, cut and whole, between NaN."""

import math

import pytest
import torch

from kernels.latent import hopper
from tests.latent_cases import caches, error, wanted

HALF, BFLOAT = torch.float16, torch.bfloat16
WITHIN = {HALF: 1e-3, BFLOAT: 6e-3}
SCALE = 192**-0.5


def decode(q, cache, table, kv_lens, scale=SCALE, *, pdl=False, chosen=None, **options):
    out = torch.full((*q.shape[:2], 512), math.nan, dtype=q.dtype, device=q.device)
    hopper.launch(q, cache, table, kv_lens, scale * math.log2(math.e), out, pdl, chosen=chosen, **options)
    return out


def problem(lens, n_heads, dtype, paged, sharp=1.0, seed=0):
    torch.manual_seed(seed)
    q = (sharp * torch.randn(len(lens), n_heads, 576)).to(dtype)
    return q, *caches(lens, dtype, "cpu", seed, paged)


@pytest.mark.parametrize(
    ("lens", "n_heads", "dtype", "paged", "chosen", "options"),
    [
        # one tile and a token, fewer than a tile, none; whole and cut, two blocks' heads
        ([65, 3, 0, 130], 70, BFLOAT, True, {"shares": 2, "least_tiles": 1}, {"check_races": True}),
        # a sequence in more segments than there are tiles a share; odd and even numbers of tiles in turn
        ([257, 64, 200], 5, HALF, False, {"shares": 3, "least_tiles": 1}, {"order": "reverse"}),
        # clusters that bring for each other
        ([129, 190], 128, HALF, True, {"shares": 2, "multicast": True, "parts_before": 9}, {"check_races": True}),
        # all alike, none is cut; the other order of parts
        ([129, 0, 190], 65, BFLOAT, False, {"shares": 2, "merge_blocks": 67}, {}),
        ([128, 128], 64, BFLOAT, False, {"shares": 3, "own_side_first": False, "parts_before": 0}, {}),
    ],
)
def test_hopper(lens, n_heads, dtype, paged, chosen, options):
    q, *rest = problem(lens, n_heads, dtype, paged, sharp=4.0)
    assert error(decode(q, *rest, chosen=chosen, **options), wanted(q, *rest, SCALE)) < WITHIN[dtype]


def test_what_is_not_a_number_stays_where_it_is():
    """NaN in a query's head reaches that head, in a token its sequence; scores of -inf in a whole row give zeros, as in
    all rungs; one of inf makes NaN."""
    q, cache, table, kv_lens = problem([70, 100], 8, HALF, True)
    q[0, 3, 5] = math.nan
    cache[table[1, 1], 7, :64] = 0
    q[0, 4, :] = 0
    q[0, 4, 575], q[0, 5, 575] = -1, 1
    cache[table[0, :2].long(), :, 575] = math.inf
    out = decode(q, cache, table, kv_lens, chosen={"shares": 2})
    assert out[0, 3].isnan().all() and out[0, 5].isnan().all()
    assert not out[0, 4].any()
    assert error(out[1:], wanted(q, cache, table, kv_lens, SCALE)[1:]) < WITHIN[HALF]
    cache[table[1, 0], 9, 0] = math.nan
    assert decode(q, cache, table, kv_lens, chosen={"shares": 2})[1].isnan().all()


def test_no_scale_that_is_not_positive():
    q, *rest = problem([3], 1, HALF, True)
    with pytest.raises(ValueError, match=r"hopper: scale must be positive, got -"):
        decode(q, *rest, scale=-1.0)
