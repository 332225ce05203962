"""Chapter 07's mix over a cache of 16 bits, on a card: right on hostile and large shapes, and the machine's bits."""

import pytest
import torch

from kernels.kv_cache import rungs

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

NAMES = [rung.name for rung in rungs.RUNGS]
GUARD, FENCE = 64, 1234.0
# n_heads, n_kv_heads, kv_len, head_dim
SHAPES = [(6, 2, 37, 34), (1, 1, 1, 2), (4, 4, 1, 128), (8, 1, 4099, 64), (32, 8, 257, 128), (3, 3, 1031, 8)]
SHAPES += [(4, 1, 1024, 256), (2, 2, 1023, 30), (32, 8, 4096, 128), (5, 5, 10007, 12)]


def run(name, *args, **options):
    return getattr(rungs, name)(*args, **options)


def between(tensor, fence=torch.nan, skip=0):
    """A copy on the card that lies between guards, `skip` elements further on than an aligned address."""
    home = torch.full((tensor.numel() + 2 * GUARD + skip,), fence, dtype=tensor.dtype, device="cuda")
    return home[GUARD + skip : GUARD + skip + tensor.numel()].view(tensor.shape).copy_(tensor)


def problem(name, n_heads, n_kv_heads, kv_len, head_dim, skip=0):
    """att and v between NaNs, out full of NaN between fences."""
    dtype = torch.float32 if name == "mix_fp32" else torch.float16
    att = torch.rand(n_heads, kv_len)
    v = torch.randn(kv_len, n_kv_heads, head_dim).to(dtype)
    out = between(torch.full((n_heads, head_dim), torch.nan), FENCE)
    return between(att), between(v, skip=skip), out


def fences_stand(out):
    home = torch.empty(0, device="cuda").set_(out.untyped_storage())
    first, last = out.storage_offset(), out.storage_offset() + out.numel()
    return bool((home[:first] == FENCE).all() and (home[last:] == FENCE).all())


def mixed(att, v):
    """The mix in float64, on the card."""
    n_heads, kv_len = att.shape
    n_kv_heads, head_dim = v.shape[1:]
    shares = att.double().view(n_kv_heads, n_heads // n_kv_heads, kv_len)
    return torch.einsum("ght,tgd->ghd", shares, v.double()).reshape(n_heads, head_dim)


def close(out, att, v):
    error = (out.double() - mixed(att, v)).norm()
    assert error <= 1e-5 * mixed(att.abs(), v.abs()).norm(), error


@pytest.mark.parametrize("name", NAMES)
def test_right_on_hostile_shapes(name):
    for shape in SHAPES:
        for skip in (0, 2, 4):
            att, v, out = problem(name, *shape, skip)
            assert run(name, att, v, out=out) is out
            close(out, att, v)
            assert fences_stand(out)


def test_odd_heads_and_odd_addresses():
    for name in ("mix_fp32", "mix_fp16", "mix_flight"):
        for skip in (0, 1, 3):
            att, v, out = problem(name, 6, 3, 523, 33, skip)
            close(run(name, att, v, out=out), att, v)
            assert fences_stand(out)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_and_the_machine_agree(name):
    """Bit for bit: the machine adds in the same order and rounds as the card does. And so does the card, each time."""
    att, v, out = problem(name, 4, 2, 1500, 40)
    first = run(name, att, v, out=out).clone()
    assert torch.equal(first.cpu(), run(name, att.cpu(), v.cpu()))
    for _ in range(20):
        assert torch.equal(run(name, att, v), first)


@pytest.mark.parametrize("name", NAMES)
def test_more_than_two_to_the_31_elements(name):
    dtype = torch.float32 if name == "mix_fp32" else torch.float16
    kv_len, n_kv_heads, head_dim = (1 << 31) // 1024 + 1001, 8, 128
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free memory on the card")
    v = torch.zeros(kv_len, n_kv_heads, head_dim, dtype=dtype, device="cuda")
    v[0], v[-1], v[-700] = 1, 2, 4
    att = torch.zeros(8, kv_len, device="cuda")
    att[:, 0], att[:, -1], att[:, -700] = 1, 1, 1
    assert bool((run(name, att, v) == 7).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_follows_its_inputs(name):
    att, v, out = problem(name, 8, 2, 700, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first call in this shape: code is loaded during the capture
        run(name, att, v, out=out)
    for _ in range(3):
        att.uniform_(), v.normal_(), out.fill_(torch.nan)
        graph.replay()
        close(out, att, v)


@pytest.mark.parametrize("name", NAMES)
def test_devices_must_agree(name):
    att, v, out = problem(name, 4, 2, 9, 8)
    with pytest.raises(ValueError, match=f"{name}: v must be on cuda:0, like the first tensor, got one on cpu"):
        run(name, att, v.cpu())
    with pytest.raises(ValueError, match=f"{name}: out must be on cuda:0, like the first tensor, got one on cpu"):
        run(name, att, v, out=out.cpu())
    assert out.isnan().all()
