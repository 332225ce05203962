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
        ([129, 190], 128, HALF, True, {"shares": 2, "multicast": True}, {"check_races": True}),
        # all alike, none is cut; the other order of parts
        ([128, 128], 64, BFLOAT, False, {"shares": 3, "own_side_first": False}, {}),
    ],
)
def test_hopper(lens, n_heads, dtype, paged, chosen, options):
    q, *rest = problem(lens, n_heads, dtype, paged, sharp=4.0)
    assert error(decode(q, *rest, chosen=chosen, **options), wanted(q, *rest, SCALE)) < WITHIN[dtype]
