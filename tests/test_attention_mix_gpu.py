"""The attention mix on a card: right on hostile and on large shapes, in graphs, and the same bits where that is
promised."""

import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand

from kernels.attention import mix, mix_answers

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

NAMES = [rung.name for rung in mix.RUNGS]
DTYPES = list(mix.DTYPES)
SHAPES = [(n, t, n // g, d) for n, g in ((1, 1), (7, 7), (6, 2), (32, 4)) for t in (1, 31, 97) for d in (1, 33, 128)]
SHAPES += [(32, 4096, 8, 128), (32, 5003, 8, 128), (4, 100003, 1, 64), (3, 257, 3, 256)]


def run(name, *args, **options):
    return getattr(mix, name)(*args, **options)


def problem(n_heads, kv_len, n_kv_heads, head_dim, dtype):
    att = torch.rand(n_heads, kv_len, device="cuda") + torch.linspace(0, 1, kv_len, device="cuda")
    v = torch.randn(kv_len, n_kv_heads, head_dim, device="cuda")
    out = torch.full((n_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
    return between(att.to(dtype)), between(v.to(dtype)), between(out, FENCE)


def truth(att, v):
    group = len(att) // v.shape[1]
    return torch.stack([att[h].double() @ v[:, h // group].double() for h in range(len(att))])


def close(out, att, v):
    wanted, scale = truth(att, v), truth(att.abs(), v.abs()).norm()
    error = (out.double() - wanted).norm() / max(float(wanted.norm()), 1e-3 * float(scale))
    assert error <= max(torch.finfo(out.dtype).eps, 1e-5), error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_right_on_hostile_shapes(name, dtype):
    for shape in SHAPES:
        att, v, out = problem(*shape, dtype)
        before = att.clone(), v.clone()
        assert run(name, att, v, out=out) is out
        close(out, att, v)
        assert fences_stand(out)
        assert torch.equal(att, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("name", NAMES)
def test_no_token_is_lost(name):
    for kv_len in (*range(1, 70), 1000, 1023, 1025, 4099):
        att, v = torch.ones(2, kv_len, device="cuda"), torch.zeros(kv_len, 1, 3, device="cuda")
        v[:, 0, 0], v[:, 0, 1], v[-1, 0, 2] = 1, torch.arange(kv_len, device="cuda") + 1, 1
        wanted = [kv_len, kv_len * (kv_len + 1) // 2, 1]  # below 2**24: exact in any order
        assert run(name, att, v).tolist() == [wanted, wanted], kv_len


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_in_every_run_where_no_atomic_adds(name, dtype):
    att, v, _ = problem(32, 4099, 8, 128, dtype)
    runs = [run(name, att, v) for _ in range(50)]
    if name == "mix_split":  # the order of its blocks is left to chance
        for out in runs:
            close(out, att, v)
    else:
        assert all(torch.equal(runs[0], out) for out in runs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mix_naive", "mix_shared"])
def test_the_card_and_the_machine_agree(name, dtype):
    """Bit for bit: the machine adds in the same order and rounds as the card does."""
    for shape in ((6, 97, 3, 40), (2, 33, 1, 128)):
        att, v, _ = problem(*shape, dtype)
        assert torch.equal(run(name, att, v).cpu(), run(name, att.cpu(), v.cpu()))


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_follows_its_inputs(name):
    for dtype in (torch.float32, torch.bfloat16):
        att, v, out = problem(8, 1031, 2, 64, dtype)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(name, att, v, out=out)
        for _ in range(3):
            v.normal_(), out.fill_(torch.nan)
            graph.replay()
            close(out, att, v)


@pytest.mark.parametrize("name", NAMES)
def test_on_the_current_stream(name):
    att, v, out = problem(8, 1031, 2, 64, torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            v.normal_()  # just before, on the same stream
            run(name, att, v, out=out)
            copy = out.clone()  # just after
        kept = v.clone()
    stream.synchronize()
    close(copy, att, kept)


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free memory on the card")
    kv_len = (1 << 31) // 1024 + 37  # of 8 kv heads of 128
    v = torch.zeros(kv_len, 8, 128, dtype=torch.float16, device="cuda")
    last = torch.randn(40, 8, 128, device="cuda").half()
    v[:3], v[-37:] = last[:3], last[3:]
    att = torch.rand(8, kv_len, device="cuda").half()
    wanted = truth(torch.cat([att[:, :3], att[:, -37:]], 1), last)
    for name in NAMES:
        off = run(name, att, v).double() - wanted
        assert off.norm() <= torch.finfo(torch.float16).eps * wanted.norm(), name
    del v
    att = torch.rand(700, kv_len * 3 // 2, device="cuda").half()  # n_heads * kv_len past 2**31
    v = torch.zeros(kv_len * 3 // 2, 1, 1, dtype=torch.float16, device="cuda")
    v[-1] = 1
    for name in NAMES:
        assert torch.equal(run(name, att, v)[:, 0], att[:, -1]), name


@pytest.mark.parametrize("name", NAMES)
def test_counters_take_cuda_tensors(name):
    att, v, _ = problem(4, 256, 2, 33, torch.float16)
    assert mix.counters(name, att, v).counters == mix.counters(name, att.cpu(), v.cpu()).counters


@pytest.mark.parametrize("name", NAMES)
def test_devices_must_agree(name):
    att, v, out = problem(4, 5, 2, 3, torch.float32)
    with pytest.raises(ValueError, match=f"{name}: v must be on cuda:0, like the first tensor, got one on cpu"):
        run(name, att, v.cpu())
    with pytest.raises(ValueError, match=f"{name}: out must be on cuda:0"):
        run(name, att, v, out=out.cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rung", mix_answers.RUNGS, ids=lambda rung: rung.name)
def test_the_answers_are_right_and_the_same_bits_in_every_run(rung, dtype):
    for shape in (*SHAPES, (32, 4099, 8, 128)):
        att, v, out = problem(*shape, dtype)
        assert rung.function(att, v, out=out) is out
        close(out, att, v)
        assert fences_stand(out)
        assert all(torch.equal(rung.function(att, v), out) for _ in range(20))
