"""bf16 products and attention on the CPU, against float64, on every instruction set that this processor has."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels import cpu_llm
from kernels.cpu_llm import bench, fused, step
from lab import machine
from ref.attention import decode_attention


def off(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("isa", [None, "portable"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (8, 32), (37, 131), (129, 257)])
def test_bfloat16_products(shape, isa):
    W, x = torch.randn(shape).bfloat16(), np.random.default_rng(2).standard_normal(shape[1]).astype(np.float32)
    out = np.full(shape[0], np.nan, np.float32)
    found = cpu_llm.gemv(W.view(torch.uint16).numpy(), x, out=out, isa=isa, threads=2)
    assert found is out and off(found, W.double().numpy() @ x) < 1e-6


def test_bfloat16_keeps_nan_infinity_and_small_numbers():
    values = torch.tensor([torch.inf, -torch.inf, 1e-40, -3.0], dtype=torch.bfloat16)
    found = cpu_llm.gemv(values.view(torch.uint16).numpy()[:, None].copy(), np.ones(1, np.float32))
    np.testing.assert_array_equal(found, values.float().numpy())
    nan = torch.full((1, 40), torch.nan, dtype=torch.bfloat16)
    assert np.isnan(cpu_llm.gemv(nan.view(torch.uint16).numpy(), np.ones(40, np.float32))).all()


@pytest.mark.parametrize("isa", [None, "portable"])
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(
    "shape", [(4, 2, 16, 1, 3), (8, 2, 20, 65, 70), (6, 6, 64, 129, 129), (7, 1, 128, 1000, 1024), (3, 1, 5, 64, 64)]
)
def test_attention(shape, threads, isa):
    """What stands behind kv_len is NaN and not read."""
    n_heads, n_kv_heads, head_dim, kv_len, capacity = shape
    rng = np.random.default_rng(3)
    q = rng.standard_normal((n_heads, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, n_kv_heads, capacity, head_dim)).astype(np.float16)
    k[:, kv_len:] = v[:, kv_len:] = np.nan
    wanted = decode_attention(q[None], *(t[:, :kv_len].transpose(1, 0, 2)[None] for t in (k, v)))[0]
    out = np.full(q.shape, np.nan, np.float32)
    assert cpu_llm.attention(q, k, v, kv_len, out=out, threads=threads, isa=isa) is out
    assert off(out, wanted) < 2e-6


def test_attention_of_large_scores_and_nan():
    """One token far above the others: exp does not overflow. A NaN in one head's keys stays in that head."""
    q = np.ones((2, 16), np.float32)
    k, v = np.zeros((2, 2, 70, 16), np.float16)
    k[:, 66], v[:, 66] = 1000, 3
    np.testing.assert_allclose(cpu_llm.attention(q, k, v, 70, threads=2), 3)
    k[1, 5] = np.nan
    found = cpu_llm.attention(q, k, v, 70, threads=2)
    assert np.isnan(found[1]).all() and (found[0] == 3).all()


def test_bad_arguments_are_named():
    q, k = np.ones((4, 8), np.float32), np.ones((2, 5, 8), np.float16)
    for error, wanted, call in [
        (TypeError, "q must be a float32", lambda: cpu_llm.attention(q.astype(np.float64), k, k, 1)),
        (ValueError, "v must be a float16 array of shape", lambda: cpu_llm.attention(q, k, k[:, :4].copy(), 1)),
        (
            ValueError,
            "n_heads must be a multiple of n_kv_heads, got 3 and 2",
            lambda: cpu_llm.attention(q[:3], k, k, 1),
        ),
        (ValueError, "kv_len must be a whole number from 1 to 5, got 6", lambda: cpu_llm.attention(q, k, k, 6)),
        (ValueError, "kv_len must be a whole number from 1 to 5, got 0", lambda: cpu_llm.attention(q, k, k, 0)),
        (ValueError, "out must not share memory with q", lambda: cpu_llm.attention(q, k, k, 5, out=q)),
        (TypeError, "W must be a float32 or float16 or uint16", lambda: cpu_llm.gemv(q.astype(np.float64), q[0])),
        (ValueError, r"x must be a float32 array of shape \(8,\)", lambda: cpu_llm.gemv(q, q[0, :4].copy())),
    ]:
        with pytest.raises(error, match=wanted):
            call()
    assert (q == 1).all()


SIZES = {"hidden": 96, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn": 84, "vocab": 71}


def token_case(dtype="fp16", length=140, **changes):
    """(config, weights, x, caches, random numbers) of a small model; matrices in rows that eights do not divide."""
    model = SimpleNamespace(**vars(bench.MODEL) | SIZES | changes)
    rng = np.random.default_rng(2)
    weights = bench.random_weights(model, "bf16" if dtype == "bf16" else "fp16")
    if dtype == "fp32":
        for layer in weights.layers:
            vars(layer).update({name: getattr(layer, name).astype(np.float32) for name in fused.MATRICES})
        weights.head = weights.head.astype(np.float32)
    caches = rng.standard_normal((2, model.n_layers, model.n_kv_heads, length, model.head_dim)).astype(np.float16)
    return model, weights, rng.standard_normal(model.hidden, np.float32), caches, rng


@pytest.mark.parametrize("isa", [None, "portable"])
@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_token_in_one_call_is_the_steps(dtype, threads, isa):
    """To rounding; and the cache's newest numbers are those that NumPy rounds, but for a last digit here and there."""
    model, weights, x, caches, rng = token_case(dtype)
    for layer in weights.layers:
        layer.bqkv = rng.standard_normal((4 + 2 * 2) * 16, np.float32)
        layer.q_norm, layer.k_norm = rng.standard_normal((2, 16), np.float32)
        layer.Wqkv = [part.copy() for part in np.split(layer.Wqkv, (64, 96))]  # as models.cpu has them
        layer.W_glu = [part.copy() for part in np.split(layer.W_glu, 2)]
    for position in (0, 1, 64, 139):
        one, other = caches.copy(), caches.copy()
        wanted = step.token_logits(model, weights, x, *one, position, threads=1)
        before = x.copy()
        found = fused.token_logits(model, weights, x, *other, position, threads=threads, isa=isa)
        assert off(found, wanted) < 2e-6 and np.array_equal(x, before)
        assert (one != other).sum() <= 3 and off(other.astype(np.float64), one.astype(np.float64)) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 70},
        {"head_dim": 6, "n_heads": 3, "n_kv_heads": 1},
        {"ffn": 3},
        {"ffn": 4103},  # six streams of rows, as x is long: so many columns in W_down ...
        {"hidden": 4101, "ffn": 7, "n_layers": 1},  # ... and in the others, three of gate and three of up
        {"vocab": 5003},  # many spans of rows
    ],
    ids=str,
)
def test_windows_and_odd_shapes_in_one_call(changes):
    model, weights, x, caches, _ = token_case(**changes)
    before = caches.copy()
    wanted = step.token_logits(model, weights, x, *caches.copy(), 100, threads=1)
    for threads in (1, 5):
        assert off(fused.token_logits(model, weights, x, *caches, 100, threads=threads), wanted) < 2e-6
    assert np.array_equal(np.delete(caches, 100, axis=3), np.delete(before, 100, axis=3))


def test_halves_in_one_call_are_numpys():
    """Values go into the cache as they come: to the nearest half, large ones to infinity, small ones kept."""
    model, weights, _, caches, rng = token_case(hidden=16, head_dim=64, n_heads=2, n_kv_heads=2)
    layer, x = weights.layers[0], np.ones(16, np.float32)
    edges = [65519, 65520, 1e5, 6.1e-5, 6e-8, 2.98e-8, 2.99e-8, 1e-9, 0, -1.0004883, 1.0014648, -3e38, np.nan, np.inf]
    layer.Wqkv[:] = 0
    layer.bqkv = np.zeros(6 * 64, np.float32)
    layer.bqkv[4 * 64 :] = np.resize(np.array(edges + list(rng.standard_normal(50)), np.float32), 128)
    fused.token_logits(model, weights, x, *caches, 7, threads=1)
    with np.errstate(over="ignore"):
        wanted = layer.bqkv[4 * 64 :].reshape(2, 64).astype(np.float16)
    np.testing.assert_array_equal(caches[1, 0, :, 7], wanted)


def test_two_threads_with_the_same_weights_keep_their_caches():
    config, weights, x, (keys, values), _ = token_case()
    caches, position = [(keys.copy(), values.copy()), (2 * keys, 3 * values)], 100
    wanted = [fused.token_logits(config, weights, x, *cache, position, threads=1) for cache in caches]
    wrong = []

    def work(cache, right):
        for _ in range(60):
            if not np.array_equal(fused.token_logits(config, weights, x, *cache, position, threads=1), right):
                wrong.append(cache)

    both = [threading.Thread(target=work, args=pair) for pair in zip(caches, wanted)]
    [one.start() for one in both]
    [one.join() for one in both]
    assert not wrong


def test_a_matrix_that_is_replaced_is_seen():
    config, weights, x, caches, _ = token_case()
    rest = x, *caches, 100
    fused.token_logits(config, weights, *rest)
    weights.layers[0].Wo = 3 * weights.layers[0].Wo
    found = fused.token_logits(config, weights, *rest)
    assert off(found, step.token_logits(config, weights, *rest)) < 1e-5


def test_what_one_call_does_not_take_is_named():
    model, weights, x, caches, _ = token_case()
    call = lambda **how: fused.token_logits(  # noqa: E731
        how.get("model", model),
        how.get("weights", weights),
        how.get("x", x),
        *how.get("caches", caches),
        how.get("at", 5),
    )
    for error, wanted, how in [
        (ValueError, "position must be from 0 to 139, as the cache has room, got 140", {"at": 140}),
        (ValueError, r"x must be a float32 array of shape \(96,\)", {"x": x[:5].copy()}),
        (TypeError, "keys must be a float16", {"caches": caches.astype(np.float32)}),
        (ValueError, "values must be a float16 array of shape", {"caches": (caches[0], caches[1][:, :, :9].copy())}),
    ]:
        with pytest.raises(error, match="token_logits: " + wanted):
            call(**how)
    mixed = SimpleNamespace(**vars(weights) | {"head": weights.head.astype(np.float32)})
    assert fused.takes(weights) and not fused.takes(mixed)
    with pytest.raises(
        TypeError, match="matrices must be of one type, float16, float32, uint16 .bfloat16., got float16, f"
    ):
        call(weights=mixed)
    short = SimpleNamespace(**vars(weights) | {"head": weights.head[:9]})
    with pytest.raises(ValueError, match="head must have 71 rows, got 9"):
        call(weights=short)
    for layers in (weights.layers[:1], weights.layers + weights.layers[:1]):
        other = SimpleNamespace(**vars(weights) | {"layers": layers})
        with pytest.raises(ValueError, match=f"token_logits: weights.layers must have 2 layers, got {len(layers)}"):
            call(weights=other)
    for name in ("attention_norm", "ffn_norm"):  # a bias or a norm of heads may be None, these may not
        layer = SimpleNamespace(**vars(weights.layers[1]) | {name: None})
        lacking = SimpleNamespace(**vars(weights) | {"layers": [weights.layers[0], layer]})
        with pytest.raises(TypeError, match=f"token_logits: {name} must be a NumPy float32 .*, got NoneType"):
            call(weights=lacking)


def test_a_team_ends_where_others_want_the_processors():
    """More threads than processors, and another program that takes all of them: who waits lets others run."""
    model, weights, x, caches, _ = token_case(n_layers=8)
    code = "import time; t = time.time()\nwhile time.time() < t + 4: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(machine.core_count())]
    begin = time.perf_counter()
    for _ in range(10):
        fused.token_logits(model, weights, x, *caches, 9, threads=8)
    taken = time.perf_counter() - begin
    for other in others:
        other.kill()
    assert taken < 2


def test_a_token_is_right_in_both_types_and_a_wrong_one_is_not_timed(monkeypatch):
    sizes = {"hidden": 96, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn": 80, "vocab": 70}
    model = SimpleNamespace(**vars(bench.MODEL) | sizes)
    monkeypatch.setattr(bench.Ladder, "again", lambda ladder, seconds: [c["call"]() for c in ladder.calls.values()])
    for name in ("fp16", "bf16"):
        bench.ladder_of(name, model, 0)
        weights = bench.random_weights(model, name)
        x = np.random.default_rng(1).standard_normal(model.hidden, np.float32)
        cache = np.random.default_rng(2).standard_normal((2, 2, 2, bench.LENGTH + 8, 16)).astype(np.float16)
        truth = bench.wanted(model, weights, x, cache)
        found = bench.token_logits(model, weights, x, *cache, bench.LENGTH - 1, threads=2)
        assert np.linalg.norm(found - truth) < bench.TOLERANCE * np.linalg.norm(truth)
        if name == "bf16":
            torch_says = bench.by_torch(model, weights, x, cache).float().numpy()
            assert np.linalg.norm(torch_says - truth) < 0.03 * np.linalg.norm(truth)
    monkeypatch.setattr(bench, "token_logits", lambda *arguments, **options: truth + 1)
    with pytest.raises(ValueError, match="is not right, so it is not timed"):
        bench.ladder_of("fp16", model, 0)
