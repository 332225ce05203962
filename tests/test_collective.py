"""Sums over devices on the SIMT machine: every rung right on hostile sizes, with the same bits everywhere, also when
devices run ahead of one another by random turns; a peer that never comes; what is refused."""

import functools
import weakref

import numpy as np
import pytest
import torch

from kernels import collective
from kernels.collective import group as groups
from kernels.collective import stress
from lab import cuda
from ref import collective as ref

RUNGS = {rung.name: rung.function for rung in collective.RUNGS}
TYPES = torch.bfloat16, torch.float16, torch.float32
HALF_STEP = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of a number, what rounding costs


def messages(devices, n, dtype, seed, offset=0):
    """Random numbers with zeros of both signs among them, `offset` elements behind an aligned place."""
    random = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(devices):
        x = torch.randn(n + offset, generator=random).to(dtype)
        x[torch.rand(n + offset, generator=random) < 0.2] = -0.0
        x[torch.rand(n + offset, generator=random) < 0.1] = 0.0
        out.append(x[offset:])
    return out


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def doubles(x):
    return x.double().numpy()


def expect_sum(got, sent):
    """Each device has the sum, rounded once or a step of float32 beside it, and the same bits as the others."""
    want = ref.all_reduce([x.double().numpy() for x in sent])[0]
    scale = sum(np.abs(x.double().numpy()) for x in sent)
    error = np.abs(got[0].double().numpy() - want)
    half = HALF_STEP[sent[0].dtype]
    assert (error <= half * np.abs(want) * 1.001 + len(sent) * 2**-24 * scale + 1e-30).all(), error.max()
    assert all(torch.equal(bits(x), bits(got[0])) for x in got)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    ("devices", "n", "dtype", "offset"),
    [(2, 1823, torch.bfloat16, 0), (2, 37, torch.float32, 1), (3, 781, torch.float16, 3), (5, 1, torch.bfloat16, 0)],
)
def test_every_rung_sums(rung, devices, n, dtype, offset):
    group = None if rung == "copies" else collective.Group(["cpu"] * devices, races=True)
    for e in range(3):
        sent = messages(devices, n, dtype, e, offset)
        got = [x.clone() if not offset else torch.cat([x[:offset], x])[offset:] for x in sent]
        assert RUNGS[rung](got, group=group, pdl=e == 2) is got
        expect_sum(got, sent)


@pytest.mark.parametrize("rung", [name for name in RUNGS if name != "copies"])
@pytest.mark.parametrize("turns", [1, 2])
def test_devices_run_ahead_and_all_is_right(rung, turns):
    """Exchanges of several sizes one after the other, replayed twice, in random turns and orders of blocks; no race."""
    group = collective.Group(["cpu"] * 2, races=True)
    group.devices.turns, group.devices.order = turns, turns
    sizes = 700, 40, 2900, 700
    tensors = [messages(2, n, torch.bfloat16, n) for n in sizes]

    def step():
        for x in tensors:
            RUNGS[rung](x, group=group, pdl=True)

    graph = group.devices.graph(step)
    for replay in range(2):
        sent = [messages(2, n, torch.bfloat16, n + replay) for n in sizes]
        for x, s in zip(tensors, sent):
            for a, b in zip(x, s):
                a.copy_(b)
        graph.replay()
        group.check("test")
        for x, s in zip(tensors, sent):
            expect_sum(x, s)


def test_a_pair_of_negative_zeros_is_the_same_on_all_devices():
    """A word of -0 is sent as +0; the sender must add the same, or the sign of a sum differs from device to device."""
    for dtype, one in (torch.bfloat16, [-0.0, -0.0]), (torch.float16, [-0.0, -0.0]), (torch.float32, [-0.0]):
        other = [-0.0] * (len(one) - 1) + [5.0]
        for a, b in (one, other), (other, one), (one, one):
            for name in "sentinel", "direct":
                got = RUNGS[name]([torch.tensor(a * 9, dtype=dtype), torch.tensor(b * 9, dtype=dtype)])
                assert torch.equal(bits(got[0]), bits(got[1]))
    x = [torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]) for _ in range(2)]
    got = collective.all_reduce([x[0], torch.ones(4)])
    assert got[0].isnan()[0] and got[1][1:].tolist() == [float("inf"), -float("inf"), 2.0]


def test_the_best_is_chosen_by_bytes():
    most = 4 << 20
    assert collective.best(most, 2, most) == "direct" and collective.best(most + 1, 2, most) == "two_shot"
    crossing = {d: next(b for b in range(0, most, 4096) if collective.best(b, d, most) == "two_shot") for d in (4, 8)}
    assert 800_000 < crossing[4] < 900_000 and 240_000 < crossing[8] < 260_000
    ran = []
    for n in (100, 30_000):
        x = messages(2, n, torch.bfloat16, 1)
        group = collective.Group(["cpu"] * 2)
        collective.all_reduce(x, group=group)
        ran.append(group.devices.reports[0].kernel)
    assert ran == ["direct", "two_shot"]


def test_bytes_over_the_link_are_as_predicted():
    n, found = 768, {}
    for name in RUNGS:
        if name == "copies":
            continue
        for devices in 2, 4:
            group = collective.Group(["cpu"] * devices)
            RUNGS[name](messages(devices, n, torch.bfloat16, 1), group=group)
            found[name, devices] = [
                sum(r.counters[f"simt__link_bytes_op_{op}.sum"] for op in ("ld", "st")) for r in group.devices.reports
            ]
    one = n * 2
    for devices in 2, 4:
        assert found["direct", devices] == found["sentinel", devices] == [(devices - 1) * one] * devices
        assert found["ll", devices] == [2 * (devices - 1) * one] * devices
        assert found["direct", devices][0] == ref.link_bytes(devices, one)
        flags = 3 * 32 * (devices - 1)  # of three blocks
        assert found["pull_once", devices] == [(devices - 1) * one + flags] * devices
        assert found["pull", devices] == [(devices - 1) * one + 2 * flags] * devices
        assert found["two_shot", devices] == [ref.link_bytes(devices, one, steps=2) + 2 * flags] * devices


# Fused.


@pytest.mark.parametrize(
    ("devices", "rows", "hidden", "dtype"),
    [(2, 3, 1000, torch.bfloat16), (2, 2, 4160, torch.float16), (3, 1, 37, torch.float32), (2, 9, 129, torch.bfloat16)],
)
def test_with_a_residual_and_a_norm(devices, rows, hidden, dtype):
    group = collective.Group(["cpu"] * devices, races=True)
    for e in range(2):
        x = [a.view(rows, hidden) for a in messages(devices, rows * hidden, dtype, e)]
        residual, weight = messages(1, rows * hidden, dtype, 7)[0].view(rows, hidden), messages(1, hidden, dtype, 8)[0]
        sent, residuals = [a.clone() for a in x], [residual.clone() for _ in x]
        weights = [weight.clone() for _ in x]
        got = collective.all_reduce_norm(x, residuals, weights, eps=1e-3, group=group, pdl=True)
        kept, want = ref.all_reduce_norm([a.double().numpy() for a in x], *map(doubles, (residual, weight)), 1e-3)
        half = HALF_STEP[dtype]
        twice = 1 if rows <= group.blocks else 3  # the sum is rounded as well, and may be the larger number
        assert (np.abs(doubles(residuals[0]) - kept) <= half * (np.abs(kept) + (twice - 1) * 2) * 1.001 + 1e-5).all()
        assert np.abs(got[0].double().numpy() - want).max() <= 3 * twice * half * np.abs(want).max() + 1e-6
        assert all(torch.equal(a, b) for a, b in zip(x, sent))
        for tensors in got, residuals:
            assert all(torch.equal(bits(a), bits(tensors[0])) for a in tensors)


@pytest.mark.parametrize(
    ("devices", "rows", "cols", "dtype"),
    [(2, 70, 256, torch.bfloat16), (3, 33, 1032, torch.float16), (2, 9, 77, torch.bfloat16)],
)
def test_in_the_epilogue_of_a_product(devices, rows, cols, dtype):
    group = collective.Group(["cpu"] * devices, races=True)
    group.devices.turns = 3
    for e in range(3):
        Ws = [W.view(rows, cols) / 8 for W in messages(devices, rows * cols, dtype, e)]
        xs, residual = messages(devices, cols, dtype, e + 5), messages(1, rows, dtype, 9)[0]
        got = collective.product(Ws, xs, [residual.clone() for _ in Ws], group=group, pdl=e > 0)
        want = ref.product(
            [W.double().numpy() for W in Ws], [x.double().numpy() for x in xs], residual.double().numpy()
        )
        assert np.abs(got[0].double().numpy() - want).max() <= HALF_STEP[dtype] * np.abs(want).max() + 1e-4
        assert all(torch.equal(bits(a), bits(got[0])) for a in got)


def test_references_agree():
    random = np.random.default_rng(1)
    arrays = [random.standard_normal((5, 7)) for _ in range(4)]
    for a, b in zip(ref.all_reduce(arrays), ref.two_shot(arrays)):
        assert np.array_equal(a, b)
    assert np.allclose(ref.all_reduce(arrays)[2], arrays[0] + arrays[1] + arrays[2] + arrays[3])
    with pytest.raises(ValueError, match="expected one shape"):
        ref.all_reduce([np.zeros(3), np.zeros(4)])


# What goes wrong.


@pytest.mark.parametrize("rung", [name for name in RUNGS if name != "copies"])
def test_a_peer_that_never_comes_is_named(monkeypatch, rung):
    group = collective.Group(["cpu"] * 3)
    group.limit = 40
    launch = group.devices.launch

    def without_the_last(launches, **options):
        return launch([*launches[:-1], None], **options)

    monkeypatch.setattr(group.devices, "launch", without_the_last)
    x = messages(3, 50, torch.float32, 1)
    with pytest.raises(collective.PeerTimeout, match=rf"{rung}: device 0 waited for device 2, which did not come"):
        RUNGS[rung](x, group=group)
    monkeypatch.undo()
    with pytest.raises(collective.PeerTimeout, match="device 2"):
        RUNGS[rung](x, group=group)


def test_a_group_that_has_failed_is_not_kept(monkeypatch):
    x = messages(2, 50, torch.float32, 1)
    monkeypatch.setattr(groups, "GROUPS", {})
    collective.ll(x)
    (kept,) = groups.GROUPS.values()
    kept.seen[1][0] = 1
    with pytest.raises(collective.PeerTimeout, match="device 1 waited for device 0"):
        kept.synchronize()
    collective.ll(x)
    assert list(groups.GROUPS.values()) != [kept]


@pytest.mark.parametrize("graph", [False, True])
def test_a_call_that_was_cut_off_is_not_followed_by_wrong_sums(monkeypatch, graph):
    """Only device 0 has had its launch. Its words lie in a mailbox, where the next exchange would take them for its."""
    group = collective.Group(["cpu"] * 2)
    group.limit, run, x = 40, group.devices.machine.run, messages(2, 50, torch.float32, 1)
    call = functools.partial(collective.direct, x, group=group)
    again = group.devices.graph(call).replay if graph else call

    def interrupted(launches, turns, owned):
        run([launches[0], []], turns, owned)
        raise KeyboardInterrupt

    monkeypatch.setattr(group.devices.machine, "run", interrupted)
    monkeypatch.setitem(groups.GROUPS, "kept", group)
    with pytest.raises(KeyboardInterrupt):
        again()
    monkeypatch.undo()
    for seen in group.seen:
        seen[0] = 0  # a card that waits has not given up yet
    for call in (lambda: collective.direct(messages(2, 50, torch.float32, 2), group=group), group.synchronize):
        with pytest.raises(RuntimeError, match="a launch was cut off before all devices had theirs"):
            call()
    assert group in groups.FAILED and group not in groups.GROUPS.values()


def test_memory_that_others_may_write_to_stays():
    """Graphs hold the addresses of a buffer that has grown; a peer that comes late writes where a failed group was."""
    group = collective.Group(["cpu"] * 2)
    collective.pull(messages(2, 50, torch.float32, 1), group=group)
    small = [weakref.ref(box) for mail in group.mails.values() for box in mail.boxes]
    collective.pull(messages(2, 5000, torch.float32, 1), group=group)
    assert len(group.replaced) == 1 and all(box() is not None for box in small)
    group.seen[0][0] = 2
    with pytest.raises(collective.PeerTimeout):
        group.check("test")
    del group
    assert all(box() is not None for box in small)
    groups.FAILED.pop()


def test_a_group_and_its_tensors_go_together():
    a, b = torch.ones(8), torch.ones(8)
    for where, got in (["cpu"], "one device only"), ([], "0"), (["cpu"] * 9, "9"):
        with pytest.raises(ValueError, match=f"Group: where must be 2 to 8 devices, got {got}"):
            collective.Group(where)
    group, half = collective.Group(["cpu"] * 2), [torch.ones(8, 8).half()] * 2
    group.devices.where = [torch.device("cpu"), torch.device("cuda:1")]
    calls = [lambda tensors, group, rung=rung: rung(tensors, group=group) for rung in RUNGS.values()]
    calls.append(lambda tensors, group: collective.all_reduce_norm(tensors, half, half, group=group))
    calls.append(lambda tensors, group: collective.product(tensors, half, half, group=group))
    for call in calls:
        with pytest.raises(ValueError, match=r"\[1\] must be on cuda:1, as the group's device there, .* on cpu"):
            call([a, b], group)
        with pytest.raises(TypeError, match="group must be a kernels.collective.Group, .* got str"):
            call([a, b], "world")
    assert (a == 1).all() and (b == 1).all()


def test_what_is_refused_is_named_and_nothing_is_written():
    a, b = torch.ones(8), torch.ones(8)
    cases = [
        (a, TypeError, "must be a list of tensors, one for each device, got Tensor"),
        ([a], ValueError, "for each of 2 to 8 devices, got one device only"),
        ([], ValueError, "got none"),
        ([torch.ones(2) for _ in range(9)], ValueError, "at most 8 devices, got 9"),
        ([a, None], TypeError, r"tensors\[1\] must be a torch tensor, got NoneType"),
        ([a, b.half()], TypeError, r"tensors\[1\] must be of torch.float32, like tensors\[0\], got torch.float16"),
        ([a, torch.ones(9)], ValueError, r"tensors\[1\] must have shape \(8,\), like tensors\[0\], got \(9,\)"),
        ([a, a], ValueError, r"tensors\[1\] must not share memory with tensors\[0\]"),
        ([a.int(), b.int()], TypeError, r"tensors\[0\] must be of torch.float32 or"),
        ([torch.ones(4, 4)[:, 1], torch.ones(4)], ValueError, r"tensors\[0\] must be contiguous"),
        ([a, b.clone().requires_grad_()], ValueError, "must not require gradients"),
        ([a, torch.ones(8, device="meta")], ValueError, "CPU or on a CUDA device, got a tensor on meta"),
    ]
    for name, rung in {**RUNGS, "all_reduce": collective.all_reduce}.items():
        for tensors, error, words in cases:
            with pytest.raises(error, match=f"{name}: .*{words}"):
                rung(tensors)
    with pytest.raises(ValueError, match="a tensor for each of 3 devices, got 2"):
        collective.direct([a, b], group=collective.Group(["cpu"] * 3))
    with pytest.raises(ValueError, match=r"sentinel: tensors must have at most \d+ bytes each.*two_shot takes any"):
        collective.sentinel([torch.ones(1 << 15), torch.ones(1 << 15)])
    assert (a == 1).all() and (b == 1).all()
    for rung in RUNGS.values():
        assert [x.numel() for x in rung([torch.ones(0), torch.ones(0)])] == [0, 0]
    x, w = [torch.ones(2, 8), torch.ones(2, 8)], [torch.ones(8), torch.ones(8)]
    for args, words in (
        ((x, [y.clone() for y in x], w[:1]), "weights must have a tensor for each of 2 devices, got 1"),
        ((x, x, w), "residuals.*must not share memory with tensors"),
        ((x, [y.clone() for y in x], w, -1.0), "eps must be a number, 0 or more, got -1.0"),
        ((x, [y[:1].clone() for y in x], w), r"residuals\[0\] must have shape \(2, 8\), none of it 0, got \(1, 8\)"),
    ):
        with pytest.raises(ValueError, match=f"all_reduce_norm: {words}"):
            collective.all_reduce_norm(*args)
    half = [torch.ones(4, 8).half() for _ in range(2)]
    with pytest.raises(TypeError, match=r"product: Ws\[0\] must be of torch.float16 or torch.bfloat16"):
        collective.product([y.float() for y in half], w, w)
    with pytest.raises(ValueError, match=r"product: xs\[0\] must have shape \(8,\)"):
        collective.product(half, [y[0, :4].clone() for y in half], [y[:, 0].clone() for y in half])
    assert all((y == 1).all() for y in (*x, *w, *half))


def test_the_stress_run_sees_what_is_wrong(monkeypatch):
    for rung in "direct", "two_shot":
        assert stress.run(["cpu"] * 2, rung, 600, 12, in_graph=6, turns=3, races=True) == (0, 12)
    monkeypatch.setitem(stress.RUNGS, "direct", lambda xs, **_: xs)
    wrong, _ = stress.run(["cpu"] * 2, "direct", 600, 6, in_graph=6)
    assert wrong > 1000


def test_on_a_card_all_blocks_find_room_and_nothing_spills():
    """512 blocks of 512 threads, 4 on each of 132 multiprocessors: that leaves 32 registers."""
    for name, most, more in ("direct", 32, ()), ("residual_norm", 128, ("-DROW_WORDS=1",)), ("two_shot", 128, ()):
        found = groups.module(name, torch.bfloat16, 2, groups.CARD_BLOCKS, *more).resources("sm_90a")
        for kernel in found.values():
            assert kernel["registers"] <= most and kernel["spill_stores"] == kernel["spill_loads"] == 0


def test_cards_that_cannot_reach_each_other_are_told_what_works(monkeypatch):
    def refuse(where, races):
        raise cuda.NoPeerAccess("cuda:0 cannot read and write the memory of cuda:1")

    monkeypatch.setattr(cuda, "Devices", refuse)
    with pytest.raises(cuda.NoPeerAccess, match=r"of cuda:1; kernels.collective.copies works there, through the host"):
        collective.Group(["cuda:0", "cuda:1"])
