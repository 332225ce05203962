"""The references of attention: four ways to write decode attention held against loops and against each other."""

from functools import reduce
from math import exp, fsum, inf, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import attention
from ref.attention import attention_mix, decode_attention, decode_online, decode_split, merge, partial, split_bounds

quick = settings(max_examples=40, deadline=None)
WAYS = {
    "two passes": decode_attention,
    "online": decode_online,
    "1 piece": lambda q, k, v, scale=None, **lens: decode_split(q, k, v, 1, scale, **lens),
    "3 pieces": lambda q, k, v, scale=None, **lens: decode_split(q, k, v, 3, scale, **lens),
    "more pieces than tokens": lambda q, k, v, scale=None, **lens: decode_split(q, k, v, k.shape[1] + 2, scale, **lens),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
# batch, n_heads, n_kv_heads, head_dim, kv_len
SHAPES = [(1, 1, 1, 1, 1), (2, 6, 2, 5, 13), (1, 3, 3, 7, 2), (3, 4, 1, 8, 31), (1, 32, 8, 16, 67), (1, 5, 1, 3, 97)]


def problem(batch, n_heads, n_kv_heads, head_dim, kv_len, seed=0, dtype=np.float64):
    rng = np.random.default_rng([seed, batch, n_heads, kv_len])
    cache = batch, kv_len, n_kv_heads, head_dim
    return [rng.standard_normal(shape).astype(dtype) for shape in ((batch, n_heads, head_dim), cache, cache)]


def by_loops(q, k, v, scale=None, kv_lens=None):
    """Attention as Python adds it up, one number at a time. → (out, lse)"""
    (batch, n_heads, head_dim), n_kv_heads = q.shape, k.shape[2]
    out, lse = np.zeros(q.shape), np.zeros((batch, n_heads))
    scale = 1 / head_dim**0.5 if scale is None else scale
    for b in range(batch):
        tokens = range(k.shape[1] if kv_lens is None else kv_lens[b])
        for h in range(n_heads):
            g = h * n_kv_heads // n_heads
            s = [scale * fsum(float(q[b, h, d]) * float(k[b, t, g, d]) for d in range(head_dim)) for t in tokens]
            p = [exp(a - max(s)) for a in s]
            lse[b, h] = max(s) + log(fsum(p))
            for d in range(head_dim):
                out[b, h, d] = fsum(a * float(v[b, t, g, d]) for a, t in zip(p, tokens)) / fsum(p)
    return out, lse


def same(found, wanted):
    assert found.shape == wanted.shape and found.dtype == np.float64
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def with_scores(scores, seed=0):
    """q, k, v of one head whose scores at scale 1 are these, and the weights that follow from them."""
    v = np.random.default_rng(seed).standard_normal((1, len(scores), 1, 2))
    return np.array([[[1.0, 0.0]]]), np.stack([scores, np.ones(len(scores))], axis=-1).reshape(1, -1, 1, 2), v


# The mix


@pytest.mark.parametrize(
    "n_heads, n_kv_heads, kv_len, head_dim", [(1, 1, 1, 1), (6, 2, 13, 5), (3, 3, 2, 7), (4, 1, 97, 3)]
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_mix_by_loops(n_heads, n_kv_heads, kv_len, head_dim, dtype):
    rng = np.random.default_rng(kv_len)
    att, v = (
        rng.random((n_heads, kv_len)).astype(dtype),
        rng.standard_normal((kv_len, n_kv_heads, head_dim)).astype(dtype),
    )
    wanted = np.zeros((n_heads, head_dim))
    for h in range(n_heads):
        for d in range(head_dim):
            g = h * n_kv_heads // n_heads
            wanted[h, d] = fsum(float(att[h, t]) * float(v[t, g, d]) for t in range(kv_len))
    same(attention_mix(att, v), wanted)


def test_mix_adds_in_float64():
    v = np.array([1e8, 1, -1e8], np.float32).reshape(3, 1, 1)
    assert attention_mix(np.ones((2, 3), np.float32), v).tolist() == [[1], [1]]


def test_mix_of_no_tokens_is_zero():
    assert attention_mix(np.ones((4, 0)), np.ones((0, 2, 3))).tolist() == np.zeros((4, 3)).tolist()


def test_the_last_step_of_attention_is_a_mix():
    q, k, v = problem(1, 6, 2, 5, 13)
    s = np.einsum("hd,thd->ht", q[0], k[0].repeat(3, axis=1)) / 5**0.5
    att = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    same(attention_mix(att, v[0]), decode_attention(q, k, v)[0])


# Decode attention, four ways


@ways
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_by_loops(way, shape):
    q, k, v = problem(*shape)
    same(way(q, k, v), by_loops(q, k, v)[0])
    same(way(q, k, v, 0.3), by_loops(q, k, v, 0.3)[0])
    same(way(q, k, v, -2), by_loops(q, k, v, -2)[0])


@ways
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_decode_of_narrow_numbers_is_in_float64(way, dtype):
    q, k, v = problem(2, 6, 2, 8, 13, dtype=dtype)
    same(way(q, k, v), by_loops(q, k, v)[0])


@ways
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_tokens_past_the_length_are_not_read(way, shape):
    q, k, v = problem(*shape)
    lens = np.random.default_rng(shape).integers(1, k.shape[1] + 1, len(q)).astype(np.int32)
    wanted, _ = by_loops(q, k, v, kv_lens=lens)
    for b, n in enumerate(lens):
        k[b, n:] = v[b, n:] = np.nan
    same(way(q, k, v, kv_lens=lens), wanted)
    same(way(q, k, v, kv_lens=np.ones(len(q), np.int64)), v[:, 0].repeat(q.shape[1] // v.shape[2], axis=1))


@ways
def test_scores_far_from_zero(way):
    # exp(710) overflows, exp(-746) is 0: without the maximum taken off, infinity over infinity or 0 over 0
    for scores in ([700, -700, 699], [-700, -701, -702], [700, 700], [-1e6, 1e6, 1e6 - 1], [-5000, -5000.5]):
        q, k, v = with_scores(np.array(scores, float))
        weights = np.exp(np.array(scores) - max(scores))
        same(way(q, k, v, 1)[0, 0], weights @ v[0, :, 0] / weights.sum())
    with np.errstate(all="raise", under="ignore"):  # and nothing on the way there overflows or is invalid
        way(*with_scores(np.array([-700.0, 700, -700, 700])), 1)


@ways
@pytest.mark.parametrize("score", [0.0, 700.0, -700.0])
def test_equal_scores_give_the_mean(way, score):
    q, k, v = with_scores(np.full(37, score))
    same(way(q, k, v, 1)[0, 0], v[0, :, 0].mean(axis=0))


@ways
@pytest.mark.parametrize("at", [0, 18, 36])
def test_one_token_dominates(way, at):
    scores = np.random.default_rng(at).standard_normal(37)
    scores[at] += 800
    q, k, v = with_scores(scores)
    assert way(q, k, v, 1)[0, 0].tolist() == v[0, at, 0].tolist()  # exp(-790) is 0


@ways
def test_scores_that_rise_move_the_maximum_at_every_token(way):
    scores = np.linspace(-30, 30, 61)
    for order in (scores, scores[::-1]):
        q, k, v = with_scores(order)
        same(way(q, k, v, 1), by_loops(q, k, v, 1)[0])


def test_each_head_reads_its_own_kv_head():
    q, k, v = problem(1, 6, 2, 4, 9)
    v[:, :, 0], v[:, :, 1] = 1, 2
    for way in WAYS.values():
        np.testing.assert_allclose(way(q, k, v)[0, :, 0], [1, 1, 1, 2, 2, 2])


# Pieces and merging


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partial_by_loops(shape):
    q, k, v = problem(*shape)
    for found, wanted in zip(partial(q, k, v, 0.4), by_loops(q, k, v, 0.4)):
        same(found, wanted)


def test_partial_without_tokens_is_empty():
    q, k, v = problem(2, 6, 2, 5, 13)
    for args, lens in (((q, k[:, :0], v[:, :0]), None), ((q, k, v), [0, 0])):
        out, lse = partial(*args, kv_lens=lens)
        assert not out.any() and (lse == -inf).all()
    out, lse = partial(q, k, v, kv_lens=[0, 13])
    assert not out[0].any() and (lse[0] == -inf).all()
    same(out[1], by_loops(q, k, v)[0][1])


def pieces(count, seed, empty=()):
    """Random pieces of two heads: outs (count, 2, 3) and lses (count, 2)."""
    rng = np.random.default_rng(seed)
    outs, lses = rng.standard_normal((count, 2, 3)), rng.uniform(-700, 700, (count, 2))
    lses[list(empty)] = -inf
    return outs, lses


def test_merge_is_a_mean_weighted_by_exp_of_lse():
    outs, lses = np.array([[1.0], [2.0], [4.0]]), np.log([3.0, 2.0, 5.0])
    out, lse = merge(outs, lses)
    same(out, np.array([2.7]))
    same(lse, np.log(10))


@pytest.mark.parametrize("nothing", [0.0, np.nan, inf])
def test_an_empty_piece_counts_for_nothing(nothing):
    outs, lses = pieces(5, 1)
    wanted = merge(outs[[1, 2, 4]], lses[[1, 2, 4]])
    outs[[0, 3]], lses[[0, 3]] = nothing, -inf
    with np.errstate(invalid="raise"):
        found = merge(outs, lses)
    for a, b in zip(found, wanted):
        assert a.tolist() == b.tolist()


def test_only_empty_pieces_give_an_empty_one():
    with np.errstate(all="raise"):
        out, lse = merge(*pieces(3, 2, empty=range(3)))
    assert out.tolist() == np.zeros((2, 3)).tolist() and lse.tolist() == [-inf, -inf]


def test_merge_of_one_piece_is_that_piece():
    outs, lses = pieces(1, 3)
    out, lse = merge(outs, lses)
    assert out.tolist() == outs[0].tolist() and lse.tolist() == lses[0].tolist()


@quick
@given(st.integers(1, 9), st.integers(0, 1 << 32), st.data())
def test_merging_in_any_order_and_in_any_tree(count, seed, data):
    empty = data.draw(st.sets(st.integers(0, count - 1)))
    outs, lses = pieces(count, seed, empty)
    wanted = merge(outs, lses)
    todo = [merge(outs[[i]], lses[[i]]) for i in data.draw(st.permutations(range(count)))]
    while len(todo) > 1:  # two neighbours or more become one, until one is left
        begin = data.draw(st.integers(0, len(todo) - 2))
        end = data.draw(st.integers(begin + 2, len(todo)))
        todo[begin:end] = [merge(*zip(*todo[begin:end]))]
    for found, right in zip(todo[0], wanted):
        same(found, right)


def test_merging_two_at_a_time_from_the_left():
    outs, lses = pieces(6, 4, empty=[0, 5])
    one_by_one = reduce(lambda a, b: merge(*zip(a, b)), zip(outs, lses))
    for found, wanted in zip(one_by_one, merge(outs, lses)):
        same(found, wanted)


@quick
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 1 << 32), st.data())
def test_any_number_of_splits_and_any_lengths(kv_len, splits, seed, data):
    q, k, v = problem(3, 4, 2, 3, kv_len, seed)
    k *= data.draw(st.sampled_from([0, 1, 300]))
    lens = np.array(data.draw(st.lists(st.integers(1, kv_len), min_size=3, max_size=3)))
    wanted = decode_attention(q, k, v, kv_lens=lens)
    same(decode_split(q, k, v, splits, kv_lens=lens), wanted)
    same(decode_online(q, k, v, kv_lens=lens), wanted)


@quick
@given(st.integers(0, 10_000), st.integers(1, 300))
def test_bounds_leave_no_token_out(kv_len, splits):
    bounds = split_bounds(kv_len, splits)
    assert bounds[0] == 0 and bounds[-1] == kv_len and len(bounds) == splits + 1
    sizes = np.diff(bounds)
    assert sizes.min() >= 0 and sizes.max() - sizes.min() <= 1


# What is wrong with a call


@ways
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 6), (2, 9, 2, 4), (2, 9, 2, 4)), r"q must have shape \(batch, n_heads, head_dim\), .* got \(2, 6\)"),
        (((2, 6, 0), (2, 9, 2, 0), (2, 9, 2, 0)), r"q must .* none of it 0"),
        (((2, 6, 4), (2, 9, 4), (2, 9, 2, 4)), r"k must have shape \(2, kv_len, n_kv_heads, 4\), .*\(2, 9, 4\)"),
        (((2, 6, 4), (2, 9, 2, 5), (2, 9, 2, 5)), r"k must .* got \(2, 9, 2, 5\)"),
        (((2, 6, 4), (3, 9, 2, 4), (3, 9, 2, 4)), r"k must .* got \(3, 9, 2, 4\)"),
        (((2, 6, 4), (2, 9, 2, 4), (2, 8, 2, 4)), r"v must have shape \(2, 9, 2, 4\), like k, got \(2, 8, 2, 4\)"),
        (((2, 6, 4), (2, 9, 4, 4), (2, 9, 4, 4)), r"n_heads must be a multiple .* 6 query heads and 4 kv heads"),
        (((2, 6, 4), (2, 9, 0, 4), (2, 9, 0, 4)), r"n_heads must be a multiple .* 0 kv heads"),
        (((2, 6, 4), (2, 0, 2, 4), (2, 0, 2, 4)), r"at least one token, got an empty cache"),
    ],
)
def test_shapes_that_do_not_fit(way, shapes, message):
    with pytest.raises(ValueError, match=message):
        way(*map(np.ones, shapes))


@ways
@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([9, 0], r"kv_lens must be from 1 to kv_len, 9, got 0"),
        ([10, 3], r"kv_lens must .* got 10"),
        ([3, -1], r"kv_lens must .* got -1"),
        ([9], r"kv_lens must be whole numbers of shape \(2,\), got int64 of shape \(1,\)"),
        ([9.0, 9.0], r"kv_lens must be whole numbers .* float64"),
        ([True, True], r"kv_lens must be whole numbers .* bool"),
    ],
)
def test_lengths_that_do_not_fit(way, lens, message):
    with pytest.raises(ValueError, match=message):
        way(*problem(2, 6, 2, 4, 9), kv_lens=lens)


@pytest.mark.parametrize("scale", [inf, np.nan])
def test_a_scale_that_is_not_finite(scale):
    with pytest.raises(ValueError, match="scale must be finite"):
        decode_attention(*problem(1, 1, 1, 2, 3), scale)


@pytest.mark.parametrize("splits", [0, -3])
def test_no_splits(splits):
    with pytest.raises(ValueError, match=f"splits must be at least 1, got {splits}"):
        decode_split(*problem(1, 1, 1, 2, 3), splits)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ((0, 2, 3), (0, 2), "at least one piece"),
        ((4, 2, 3), (), "at least one piece"),
        ((4, 2, 3), (4, 3), r"outs must have the shape of lses, \(4, 3\)"),
        ((4, 2), (4, 2), "outs must have the shape of lses"),
    ],
)
def test_pieces_that_do_not_fit(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge(np.ones(outs), np.ones(lses))


@pytest.mark.parametrize(
    ("att", "v", "message"),
    [
        ((5,), (5, 1, 2), r"att must have shape \(n_heads, kv_len\), got \(5,\)"),
        ((4, 5), (6, 2, 3), r"v must have shape \(5, n_kv_heads, head_dim\), .* got \(6, 2, 3\)"),
        ((4, 5), (5, 3), r"v must have shape .* got \(5, 3\)"),
        ((4, 5), (5, 3, 2), r"4 query heads and 3 kv heads"),
    ],
)
def test_mixes_that_do_not_fit(att, v, message):
    with pytest.raises(ValueError, match=message):
        attention_mix(np.ones(att), np.ones(v))


def test_nan_in_the_cache_reaches_its_heads_and_no_others():
    for where in ("k", "v"):
        q, k, v = problem(2, 4, 2, 3, 5)
        {"k": k, "v": v}[where][1, 2, 0, 1] = np.nan
        for way in WAYS.values():
            assert np.isnan(way(q, k, v)).any(axis=2).tolist() == [[False] * 4, [True, True, False, False]]


def test_the_public_names():
    public = {name for name, value in vars(attention).items() if callable(value) and not name.startswith("_")}
    wanted = {"attention_mix", "decode_attention", "decode_online", "partial", "merge", "split_bounds", "decode_split"}
    assert public == wanted
