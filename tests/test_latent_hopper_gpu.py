"""kernels/latent/hopper.cu on a card: hostile lengths, each way to go about it, and a captured graph that follows
lengths and tables."""

import math

import pytest
import torch

from tests.latent_cases import caches, error, wanted
from tests.test_latent_hopper import BFLOAT, HALF, SCALE, decode

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
WITHIN = {HALF: 1.5e-3, BFLOAT: 1e-2}
WAYS = [
    {},
    {"multicast": True},
    {"parts_before": 9},
    {"parts_before": 0, "own_side_first": False},
    {"least_tiles": 1, "merge_tiles": 0},
]


@pytest.mark.parametrize("chosen", WAYS, ids=str)
@pytest.mark.parametrize("paged, dtype", [(True, BFLOAT), (False, HALF)])
@pytest.mark.parametrize(
    ("lens", "n_heads"),
    [
        ([1], 128),
        ([64], 16),
        ([4096], 128),
        ([33001], 128),
        ([0, 65, 4097, 0, 12, 30000, 1, 640], 128),
        ([2048] * 33, 65),
        ([4096] * 66, 100),
        ([3000, 1] * 70, 16),
        (list(range(1, 200, 3)), 127),
    ],
    ids=lambda v: str(v)[:20],
)
def test_decode(lens, n_heads, paged, dtype, chosen):
    for sharp in (1.0, 8.0):  # flat weights; maxima that rise late and far
        torch.manual_seed(1)
        q = (sharp * torch.randn(len(lens), n_heads, 576)).to("cuda", dtype)
        tensors = caches(lens, dtype, "cuda", 0, paged)
        got = decode(q, *tensors, chosen=chosen)
        assert error(got, wanted(q, *tensors, SCALE)) < WITHIN[dtype]
        assert torch.equal(decode(q, *tensors, chosen=chosen), got)


@pytest.mark.parametrize("chosen", WAYS[:2], ids=str)
@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_follows_lengths_and_tables(pdl, chosen):
    """Captured once behind a kernel that writes q; replayed with other lengths and pages."""
    torch.manual_seed(0)
    lens = [5000, 640, 64, 4000, 1]
    pages, table, kv_lens = caches([5000] * 5, BFLOAT, "cuda", 0, True)
    pages.nan_to_num_(0.5)
    source, q = (torch.randn(5, 128, 576, device="cuda").to(BFLOAT) for _ in range(2))
    q.copy_(source)
    decode(q, pages, table, kv_lens, pdl=pdl, chosen=chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.copy_(source)
        out = decode(q, pages, table, kv_lens, pdl=pdl, chosen=chosen)
    for step in range(6):
        source.normal_()
        lens = lens[1:] + [lens[0] - 63 if step % 2 else 0]
        kv_lens.copy_(torch.tensor(lens).clamp(0, 5000))
        table.copy_(table.flip(0))
        out.fill_(math.nan)
        graph.replay()
        assert error(out, wanted(source, pages, table, kv_lens, SCALE)) < WITHIN[BFLOAT]
