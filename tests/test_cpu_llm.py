"""bf16 products and attention on the CPU, against float64, on every instruction set that this processor has."""

import numpy as np
import pytest
import torch

from kernels import cpu_llm
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


def test_a_token_is_right_in_both_types_and_a_wrong_one_is_not_timed(monkeypatch):
    from types import SimpleNamespace

    from kernels.cpu_llm import bench

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
