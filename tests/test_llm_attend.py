"""A token's whole attention in one launch, against the reference: on the SIMT machine, and on a card where there is
one."""

import math

import pytest
import torch
from test_llm_kernels import DEVICES, arguments

from kernels.llm import attend, attending, attends, rope_append

HEADS = [(8, 2, 64), (3, 3, 32), (14, 2, 48), (16, 1, 128), (5, 5, 16)]
BOUND = {torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def wanted(call, n_heads, n_kv_heads, scale=None, **more):
    """(queries' result, key, value) in float64, of a cache that holds the tokens before."""
    lens, head_dim = int(call["kv_len"]), call["qkv"].shape[1]
    x = call["qkv"].double().cpu()
    if more.get("bias") is not None:
        x = x + more["bias"].double().cpu()
    q, k, v = x.split((n_heads, n_kv_heads, n_kv_heads))
    if more.get("q_norm") is not None:
        q, k = (
            t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * more[name].double().cpu()
            for t, name in ((q, "q_norm"), (k, "k_norm"))
        )
    angle = 2 * math.pi * (lens - 1) * call["turns"].cpu()

    def turned(t):
        a, b = t.chunk(2, dim=1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=1)

    q, k = turned(q), turned(k)
    keys, values = (torch.cat((call[name][: lens - 1].double().cpu(), new[None])) for name, new in (("k", k), ("v", v)))
    q = q.view(n_kv_heads, -1, head_dim)
    scores = torch.einsum("hgd,thd->hgt", q, keys) * (head_dim**-0.5 if scale is None else scale)
    return torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).reshape(n_heads, head_dim), k, v


def filled(call, generator=0):
    """Earlier tokens; what stands behind them stays NaN."""
    made = torch.Generator().manual_seed(generator)
    lens = int(call["kv_len"])
    for name in ("k", "v"):
        old = torch.randn((max(0, lens - 1), *call[name].shape[1:]), generator=made)
        call[name][: lens - 1] = old.to(call[name])
    return call


def off(found, truth):
    return float((found.double().cpu() - truth).norm() / truth.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(
    "n_heads, n_kv_heads, head_dim", [(8, 2, 64), (3, 3, 32), (14, 2, 48), (16, 1, 128), (5, 5, 16)]
)
def test_it_is_the_reference(n_heads, n_kv_heads, head_dim, dtype, device):
    for lens in (1, 16, 17, 43) if device == "cpu" else (1, 16, 17, 128, 300, 1000, 4095):
        call = arguments(head_dim, n_heads, n_kv_heads, lens + 3, lens, dtype, device)
        filled(call)
        truth, key, value = wanted(call, n_heads, n_kv_heads)
        before = call["k"].clone()
        out = torch.full((n_heads, head_dim), math.nan, dtype=dtype, device=device)
        assert attend(**call, eps=1e-5, out=out) is out
        assert off(out, truth) < BOUND[dtype], lens
        assert off(call["k"][lens - 1], key) < BOUND[dtype] and off(call["v"][lens - 1], value) < BOUND[dtype]
        assert torch.equal(call["k"][: lens - 1], before[: lens - 1]) and call["k"][lens:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_biases_norms_and_a_scale(device):
    call = filled(arguments(64, 6, 2, 40, 33, torch.float16, device))
    more = {"bias": torch.randn_like(call["qkv"])}
    more |= {name: torch.randn_like(call["qkv"][0]) for name in ("q_norm", "k_norm")}
    truth, key, _ = wanted(call, 6, 2, 0.3, **more)
    assert off(attend(**call, **more, eps=1e-5, scale=0.3, pdl=True), truth) < 2e-3
    assert off(call["k"][32], key) < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_it_appends_what_rope_append_does(device):
    first, second = (filled(arguments(128, 8, 2, 30, 30, torch.float16, device)) for _ in range(2))
    second["qkv"].copy_(first["qkv"])
    rope_append(**first)
    attend(**second)
    assert torch.equal(first["k"], second["k"]) and torch.equal(first["v"], second["v"])


@pytest.mark.parametrize("device", DEVICES)
def test_a_length_outside_appends_nothing(device):
    for lens in (-3, 0, 12):
        call = arguments(32, 4, 2, 9, lens, torch.float16, device)
        call["k"].normal_(), call["v"].normal_()
        before = call["k"].clone(), call["v"].clone()
        found = attend(**call)
        assert torch.equal(call["k"], before[0]) and torch.equal(call["v"], before[1])
        assert (found == 0).all() if lens < 1 else torch.isfinite(found).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cluster, warps, stages", [(2, 2, 1), (4, 4, 2), (8, 2, 3), (16, 8, 1)])
def test_every_plan_gives_the_same(cluster, warps, stages, device, monkeypatch):
    call = filled(arguments(64, 8, 2, 150, 141, torch.float16, device))
    truth, *_ = wanted(call, 8, 2)
    found = attending.plan(4, 2, 64, 132, 200 << 10, cluster, warps, stages)
    assert found[:3] == (cluster, warps, stages)
    monkeypatch.setattr(attending, "plan", lambda *arguments: found)
    monkeypatch.setattr(attending, "CALLS", attending.Calls("attend", outs=3))
    assert off(attend(**call), truth) < 1.5e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity, warps", [(1024, 4), (1025, 8)])
def test_blocks_beside_which_others_fit(capacity, warps, device):
    call = filled(arguments(32, 4, 1, capacity, 610, torch.float16, device))
    found = attending.expect_attend(**call, beside=True)[1]
    assert found[:3] == (8, warps, 2) and found.shared < attending.expect_attend(**call)[1].shared
    truth, *_ = wanted(call, 4, 1)
    assert off(attend(**call, beside=True, pdl=True), truth) < 1.5e-3


def test_no_race_and_nothing_past_the_end():
    call = filled(arguments(32, 4, 2, 20, 20, torch.float16, "cpu"))
    others = call["qkv"], call["turns"], call["kv_len"], None, None, None
    out = torch.full((4, 32), math.nan, dtype=torch.float16)
    found = attending.plan(2, 2, 32, 132, 200 << 10, 4, 2, 2)
    report = attending._launch(found, 4, 2, 20, others, call["k"], call["v"], out, 1e-6, None, False, check_races=True)
    assert report is not None and off(out, wanted(call, 4, 2)[0]) < 1.5e-3


def test_what_cannot_be_is_said():
    call = arguments(32, 4, 2, 9, 5)
    for change, error, text in (
        ({"qkv": torch.randn(40, 32).half(), "k": call["k"][:, :1].clone(), "v": call["v"][:, :1].clone()}, ValueError,
         "at most 16 query heads of a kv head"),
        ({"v": call["v"][:-1]}, ValueError, "attend: v must have shape"),
        ({"kv_len": call["kv_len"].long()}, TypeError, "attend: kv_len must be"),
        ({"out": call["k"][0]}, ValueError, "attend: out must"),
        ({"q_norm": call["qkv"][0].clone()}, ValueError, "q_norm and k_norm must both be given"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            attend(**(call | change))
    assert call["k"].isnan().all()


def test_where_it_is_the_better_way():
    assert attends(32, 8, 128, 1024, "cpu") and not attends(71, 1, 64, 1024, "cpu")
    plans = {n: attending.plan(4, n, 128, 132, 232448) for n in (1, 8, 16, 32)}
    assert [plans[n].cluster for n in plans] == [8, 8, 8, 4]
    assert attends(32, 8, 128, 8192, "cpu") and not attends(32, 8, 128, 8193, "cpu")
    assert attends(4, 1, 128, 2048, "cpu") and not attends(4, 1, 128, 2049, "cpu")
    assert all(plan.shared <= 232448 for plan in plans.values())
    for sizes, text in (
        ((4, 0, 64, 128), "attends: n_kv_heads must be at least 1, got 0"),
        ((0, 1, 64, 128), "attends: n_heads must be at least 1, got 0"),
        ((4, 3, 64, 128), "attends: n_heads must be a multiple of n_kv_heads, 3, got 4"),
        ((4, 2, 64, 0), "attends: capacity must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=text):
            attends(*sizes, "cpu")
