"""Sums over devices on two cards or more: hostile sizes, in graphs, as dependent launches, at uneven times."""

import numpy as np
import pytest
import torch

from kernels import collective
from kernels.collective import stress
from ref import collective as ref

CARDS = torch.cuda.device_count() if torch.version.cuda is not None else 0
pytestmark = pytest.mark.skipif(CARDS < 2, reason="needs two NVIDIA GPUs that reach each other's memory")
RUNGS = {rung.name: rung.function for rung in collective.RUNGS} | {"all_reduce": collective.all_reduce}
PUSHED = ("ll", "sentinel", "direct")
SIZES = [1, 7, 8, 513, 4096, 5001, 65_537, 1 << 20, (2 << 20) + 3]  # numbers; the last beyond a mailbox of bf16
TYPES = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=[n for n in (2, 4, 8) if n <= CARDS])
def cards(request):
    return [f"cuda:{d}" for d in range(request.param)]


def messages(cards, n, dtype, offset=0):
    return [torch.randn(n + offset, device=card).to(dtype)[offset:] for card in cards]


def expect_sum(got, sent):
    want = ref.all_reduce([x.double().cpu().numpy() for x in sent])[0]
    scale = sum(np.abs(x.double().cpu().numpy()) for x in sent)
    half = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[sent[0].dtype]
    error = np.abs(got[0].double().cpu().numpy() - want)
    assert (error <= half * np.abs(want) * 1.001 + len(sent) * 2**-24 * scale + 1e-30).all()
    assert all(torch.equal(x.cpu(), got[0].cpu()) for x in got)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_sums(cards, rung, dtype):
    group = None if rung == "copies" else collective.Group(cards)
    for n in SIZES:
        if rung in PUSHED and n * dtype.itemsize > 4 << 20:
            continue
        for offset, pdl in (0, False), (1, True):
            sent = messages(cards, n, dtype, offset)
            got = [x.clone() for x in sent]
            if offset:
                got = [torch.cat([x[:1], x])[1:] for x in sent]
            for card in cards:
                torch.cuda.synchronize(card)
            RUNGS[rung](got, group=group, pdl=pdl)
            expect_sum(got, sent)


@pytest.mark.parametrize("rung", [name for name in RUNGS if name != "copies"])
def test_graphs_are_replayed(cards, rung):
    group = collective.Group(cards)
    xs = messages(cards, 4096, torch.bfloat16)
    graph = group.devices.graph(lambda: [RUNGS[rung](xs, group=group, pdl=True) for _ in range(3)])
    for _ in range(50):
        values = [torch.randint(-2, 3, (4096,), device=card).to(torch.bfloat16) for card in cards]
        for x, value in zip(xs, values):
            x.copy_(value)
        group.devices.synchronize()
        graph.replay()
        group.synchronize()
        total = sum(v.cpu().float() for v in values)  # exact; then summed twice more
        want = total * len(cards) ** 2
        assert all(torch.equal(x.cpu().float(), want.to(torch.bfloat16).float()) for x in xs)


@pytest.mark.parametrize("rung", stress.RUNGS)
def test_no_sum_is_wrong_at_uneven_times(cards, rung):
    for nbytes in 8192, 100_000 // 16 * 16:
        wrong, made = stress.run(cards, rung, nbytes, 3000)
        assert (wrong, made) == (0, 3000 + stress.IN_GRAPH)  # the first graph's warming up


@pytest.mark.parametrize("rows", [1, 5, 128, 600])
@pytest.mark.parametrize("hidden", [4096, 1000, 14336])
def test_with_a_residual_and_a_norm(cards, rows, hidden):
    group = collective.Group(cards)
    for dtype in TYPES:
        xs = [x.view(rows, hidden) for x in messages(cards, rows * hidden, dtype)]
        residual, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
        residuals, weights = ([t.to(card) for card in cards] for t in (residual, weight))
        got = collective.all_reduce_norm(xs, residuals, weights, group=group, pdl=True)
        group.synchronize()
        doubles = [t.double().cpu().numpy() for t in (residual, weight)]
        kept, want = ref.all_reduce_norm([x.double().cpu().numpy() for x in xs], *doubles)
        half = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
        assert np.abs(residuals[0].double().cpu().numpy() - kept).max() <= half * np.abs(kept).max()
        assert np.abs(got[0].double().cpu().numpy() - want).max() <= 3 * half * np.abs(want).max()
        assert all(torch.equal(a.cpu(), got[0].cpu()) for a in got)


@pytest.mark.parametrize(("rows", "cols"), [(4096, 2048), (4096, 7168), (1001, 1000), (77, 33), (1, 8)])
def test_in_the_epilogue_of_a_product(cards, rows, cols):
    group = collective.Group(cards)
    for dtype in TYPES[:2]:
        for _ in range(5):
            Ws = [(W / cols**0.5).view(rows, cols) for W in messages(cards, rows * cols, dtype)]
            xs, residual = messages(cards, cols, dtype), torch.randn(rows).to(dtype)
            for card in cards:
                torch.cuda.synchronize(card)  # a dependent launch may read W
            got = collective.product(Ws, xs, [residual.to(card) for card in cards], group=group, pdl=True)
            group.synchronize()
            to = [[t.double().cpu().numpy() for t in tensors] for tensors in (Ws, xs)]
            want = ref.product(*to, residual.double().numpy())
            assert np.abs(got[0].double().cpu().numpy() - want).max() <= 2**-7 * max(1, np.abs(want).max())
            assert all(torch.equal(a.cpu(), got[0].cpu()) for a in got)


def test_a_peer_that_does_not_come_is_named_and_nothing_hangs(monkeypatch):
    cards = ["cuda:0", "cuda:1"]
    group, xs = collective.Group(cards), messages(["cuda:0", "cuda:1"], 4096, torch.bfloat16)
    collective.direct(xs, group=group)
    group.synchronize()
    group.limit = 100_000
    launch = group.devices.launch
    monkeypatch.setattr(group.devices, "launch", lambda launches, **options: launch([launches[0], None], **options))
    collective.direct(xs, group=group)
    with pytest.raises(collective.PeerTimeout, match="cuda:0 waited for cuda:1, which did not come"):
        group.synchronize()


def test_one_card_twice_and_mixed_places_are_refused():
    x, y = torch.ones(8, device="cuda:0"), torch.ones(8, device="cuda:0")
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] both on cuda:0"):
        collective.all_reduce([x, y])
    with pytest.raises(ValueError, match="on cards, or all on the CPU, got tensors on cuda:0, cpu"):
        collective.all_reduce([x, torch.ones(8)])
