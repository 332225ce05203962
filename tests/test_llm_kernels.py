"""embed and rope_append against the reference: on the SIMT machine, and on a card where there is one."""

import math

import numpy as np
import pytest
import torch

import ref.llm
from kernels.llm import embed, greedy, rope_append
from kernels.rotary import rope_frequencies
from ref.fusion import rmsnorm

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
ALLOWED = {torch.float16: 5.2e-4, torch.bfloat16: 4.1e-3}  # rounding a result, at its worst, and a little
on_both = pytest.mark.parametrize("device", DEVICES)
in_both = pytest.mark.parametrize("dtype", ALLOWED, ids=str)


def off(found, wanted):
    return np.linalg.norm(found.double().cpu().numpy() - wanted) / np.linalg.norm(wanted)


def arguments(head_dim, n_heads=6, n_kv_heads=2, capacity=9, kv_len=5, dtype=torch.float16, device="cpu", theta=1e4):
    made = lambda *shape: torch.randn(shape).to(dtype).to(device)  # noqa: E731
    turns = torch.from_numpy(ref.llm.rope_frequencies(head_dim, theta) / (2 * np.pi)).to(device)
    cache = torch.full((2, capacity, n_kv_heads, head_dim), math.nan, dtype=dtype, device=device)
    lens = torch.tensor([kv_len], dtype=torch.int32, device=device)
    return {
        "qkv": made(n_heads + 2 * n_kv_heads, head_dim),
        "turns": turns,
        "kv_len": lens,
        "k": cache[0],
        "v": cache[1],
    }


@on_both
@in_both
@pytest.mark.parametrize("hidden", [1, 255, 257])
def test_embed(hidden, dtype, device):
    E = torch.randn(13, hidden).to(dtype).to(device)
    for token in (0, 7, 12):
        out = torch.full((hidden,), math.nan, dtype=dtype, device=device)
        assert embed(E, torch.tensor([token], device=device), out=out) is out and torch.equal(out, E[token])
    for token in (-1, 13, 2**40):
        assert embed(E, torch.tensor([token], device=device)).isnan().all()


@on_both
@in_both
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("head_dim", [2, 20, 64, 128, 130])
def test_rope_append(head_dim, with_norms, dtype, device):
    call = arguments(head_dim, dtype=dtype, device=device)
    more = {"bias": torch.randn_like(call["qkv"])} if with_norms else {}
    if with_norms:
        more |= {name: torch.randn_like(call["qkv"][0]) for name in ("q_norm", "k_norm")}
    q = rope_append(**call, **more, eps=1e-5)
    x = call["qkv"].double().cpu().numpy() + (more["bias"].double().cpu().numpy() if with_norms else 0)
    wanted = {"q": x[:6], "k": x[6:8], "v": x[8:]}
    for name in "qk":
        if with_norms:
            weight = more[name + "_norm"].double().cpu().numpy()
            wanted[name] = np.stack([rmsnorm(head, weight, 1e-5) for head in wanted[name]])
        wanted[name] = ref.llm.rope(wanted[name], 4, ref.llm.rope_frequencies(head_dim))
    assert off(q, wanted["q"]) < ALLOWED[dtype]
    for name in "kv":
        assert off(call[name][4], wanted[name]) < ALLOWED[dtype]
        assert call[name][[0, 1, 2, 3, 5, 6, 7, 8]].isnan().all()


@on_both
def test_angles_keep_their_digits_far_into_the_context(device):
    """At token 131,071 the fastest pair has turned 20,861 times: in float32 its angle would be off by 0.008."""
    call = arguments(64, 2, 1, 131072, 131072, dtype=torch.float16, device=device, theta=5e5)
    wanted = ref.llm.rope(call["qkv"][:2].double().cpu().numpy(), 131071, ref.llm.rope_frequencies(64, 5e5))
    assert off(rope_append(**call), wanted) < ALLOWED[torch.float16]


@on_both
def test_a_length_outside_of_the_cache_writes_nothing(device):
    for kv_len in (0, -3, 10):
        call = arguments(16, kv_len=kv_len, device=device)
        out = torch.full((6, 16), 7.0, dtype=torch.float16, device=device)
        rope_append(**call, out=out)
        assert (out == 7).all() and call["k"].isnan().all() and call["v"].isnan().all()


def test_bad_arguments_are_named():
    call = arguments(16)
    for changes, error, wanted in [
        ({"qkv": call["qkv"].float()}, TypeError, "qkv must be of torch.float16 or torch.bfloat16, got torch.float32"),
        ({"turns": call["turns"][:3]}, ValueError, r"turns must have shape \(8,\)"),
        ({"kv_len": call["kv_len"].long()}, TypeError, "kv_len must be of torch.int32, got torch.int64"),
        ({"v": call["v"][:3]}, ValueError, r"v must have shape \(9, 2, 16\).*got \(3, 2, 16\)"),
        ({"qkv": call["qkv"][:4]}, ValueError, "qkv must have n_heads \\+ 2 · 2 rows.*got 4"),
        ({"bias": call["qkv"][0]}, ValueError, r"bias must have shape \(10, 16\)"),
        ({"q_norm": call["qkv"][0].clone()}, ValueError, "q_norm and k_norm must both be given, or neither"),
        ({"k": call["v"]}, ValueError, "k must not share memory with v"),
        ({"out": call["qkv"][:6]}, ValueError, "out must not share memory with qkv"),
    ]:
        with pytest.raises(error, match="rope_append: " + wanted):
            rope_append(**call | changes)
    assert call["k"].isnan().all() and call["v"].isnan().all()
    E = torch.ones(3, 4, dtype=torch.float16)
    with pytest.raises(TypeError, match="embed: token must be of torch.int64, got torch.int32"):
        embed(E, torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"embed: token must have shape \(1,\)"):
        embed(E, torch.tensor([1, 2]))


@on_both
@in_both
def test_greedy(dtype, device):
    """The argmax, as PyTorch has it; of equal ones the first; and all is as it was for the next."""
    token, kv_len = (
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.tensor([4], dtype=torch.int32, device=device),
    )
    state = torch.zeros(2, dtype=torch.int64, device=device)
    for count, vocab in enumerate((1, 255, 1025, 5000)):
        logits = torch.randn(vocab).to(dtype).to(device)
        assert greedy(logits, token, kv_len, state) is token
        assert int(token) == int(logits.float().argmax()) and int(kv_len) == 5 + count and (state == 0).all()
    for values, wanted in (
        ([-3, -2, -2, -5], 1),
        ([-0.0, 0, -0.0], 0),
        ([1, math.nan, math.inf, math.nan], 1),
        ([-math.inf] * 3, 0),
    ):
        greedy(torch.tensor(values).to(dtype).to(device), token, kv_len, state)
        assert int(token) == wanted
    logits = torch.full((3000,), 2.0).to(dtype).to(device)
    logits[[1500, 2900]] = 7
    greedy(logits, token, kv_len, state, pdl=True)
    assert int(token) == 1500


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_greedy_takes_as_many_logits_as_it_says():
    """Places up to the largest int: the last step along them goes beyond it."""
    logits = torch.zeros(2**31 - 1, dtype=torch.float16, device="cuda")
    logits[-1] = 1
    token, kv_len = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    state = torch.zeros(2, dtype=torch.int64, device="cuda")
    assert greedy(logits, token, kv_len, state).item() == 2**31 - 2
    assert kv_len.item() == 2 and state.tolist() == [0, 0]


def test_greedy_says_what_cannot_be():
    logits, token, kv_len = torch.randn(9).half(), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    state = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="greedy: logits must"):
        greedy(logits[:0], token, kv_len, state)
    with pytest.raises(TypeError, match="greedy: token must be"):
        greedy(logits, token.int(), kv_len, state)
    with pytest.raises(ValueError, match="greedy: token must not share memory with state"):
        greedy(logits, state[:1], kv_len, state)
    assert int(kv_len) == 1 and (state == 0).all()


@pytest.mark.parametrize(
    "scaling", [None, ("linear", 4.0), ("llama3", 8.0, 1.0, 4.0, 8192), ("llama3", 32.0, 2.0, 3.0, 64)]
)
def test_pairs_turn_as_the_reference_says(scaling):
    for head_dim, theta in ((2, 10000.0), (16, 500000.0), (128, 1e6), (96, 10000)):
        wanted = ref.llm.rope_frequencies(head_dim, theta, scaling)
        np.testing.assert_allclose(rope_frequencies(head_dim, theta, scaling), wanted, rtol=1e-12)
