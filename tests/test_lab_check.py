"""The checker: planted wrong kernels are caught, right ones pass, and its message says what and where."""

import ctypes
import re

import numpy as np
import pytest

from lab import check, compile_c, hostile_shapes
from lab.check import GUARD, apart, between_guards, differs, is_unset, unset

# Each function computes y = W x; all but the first have one defect.
PLANTED = """
#define GEMV(name, first, last, columns, after)                                                      \\
    void name(const float *W, const float *x, float *y, int64_t rows, int64_t cols) {                \\
        for (int64_t r = first; r < last; r++) {                                                     \\
            double acc = 0;                                                                          \\
            for (int64_t c = 0; c < columns; c++) acc += (double)W[r * cols + c] * x[c];             \\
            y[r] = acc;                                                                              \\
        }                                                                                            \\
        after;                                                                                       \\
    }
GEMV(right, 0, rows, cols, )
GEMV(dropped_tail, 0, rows, cols / 4 * 4, )
GEMV(skipped_row, 0, rows - 1, cols, )
GEMV(skipped_first_row, 1, rows, cols, )
GEMV(reads_past_the_end, 0, rows, cols + 1, )
GEMV(writes_past_the_end, 0, rows, cols, y[rows] = 0)
GEMV(writes_before_the_start, 0, rows, cols, y[-1] = 0)
GEMV(takes_a_row_too_many, 0, rows + 1, cols, )
GEMV(writes_its_input, 0, rows, cols, ((float *)x)[cols - 1] = 3)

void run(int which, const float *W, const float *x, float *y, int64_t rows, int64_t cols) {
    void (*all[])(const float *, const float *, float *, int64_t, int64_t) = {
        right, dropped_tail, skipped_row, skipped_first_row, reads_past_the_end, writes_past_the_end,
        writes_before_the_start, takes_a_row_too_many, writes_its_input};
    all[which](W, x, y, rows, cols);
}
"""
NAMES = re.findall(r"^GEMV\((\w+)", PLANTED, re.M)


def reference(W, x):
    return W.astype(np.float64) @ x.astype(np.float64)


def inputs(rng, rows, cols):
    return rng.standard_normal((rows, cols)).astype(np.float32), rng.standard_normal(cols).astype(np.float32)


def out(rows, cols):
    return (rows,), np.float32


def planted(name):
    library = compile_c(PLANTED, name="planted.c", openmp=False)

    def gemv(W, x, out):
        library.run(NAMES.index(name), W, x, out, *W.shape)
        return out

    return gemv


def into(function):
    """A kernel with out= from one that returns."""

    def gemv(W, x, out):
        out[...] = function(W, x)
        return out

    return gemv


def ask(function, *, make_inputs=inputs, shapes=None, out=out, reference=reference, **options):
    return check(function, reference, make_inputs, shapes or hostile_shapes(2), out=out, **options)


def test_right_kernels_pass():
    n = len(hostile_shapes(2))
    for right in (planted("right"), into(lambda W, x: W @ x), into(reference)):
        verdict = ask(right)
        assert verdict and str(verdict) == repr(verdict) == f"right on {n} shapes"
        assert verdict.error < 1e-5 and verdict.shapes == n
    assert str(ask(into(reference), shapes=[(1, 1)])) == "right on 1 shape"
    assert ask(reference, out=None)
    assert ask(lambda W, x: reference(W, x).tolist(), out=None)


def test_out_need_not_be_returned():
    def gemv(W, x, out):
        out[...] = W @ x

    assert ask(gemv)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dropped_tail", "elements differ"),
        ("skipped_row", "was never set"),
        ("skipped_first_row", "[0] was never set, or only added to: it is NaN, as before the call"),
        ("reads_past_the_end", "is nan, expected"),
        ("writes_past_the_end", "elements outside the output were overwritten"),
        ("writes_before_the_start", "elements outside the output were overwritten"),
        ("takes_a_row_too_many", "elements outside the output were overwritten"),  # with a NaN, read past W
        ("writes_its_input", "input number 2 was changed"),
    ],
)
def test_planted_c_kernels_are_caught(name, said):
    verdict = ask(planted(name))
    assert not verdict and said in str(verdict)


def test_reading_one_element_before_an_input_is_caught():
    def gemv(W, x, out):
        one_early = (ctypes.c_float * x.size).from_address(x.ctypes.data - x.itemsize)
        out[...] = W @ np.frombuffer(one_early, np.float32)

    assert "is nan" in str(ask(gemv))


def test_a_result_that_is_returned_but_not_written_is_caught():
    assert "not written to out" in str(ask(lambda W, x, out: W @ x))


def test_an_output_that_was_not_touched_is_caught():
    said = str(ask(lambda W, x, out: None))
    assert said.endswith("First: [0] was never set, or only added to: it is NaN, as before the call")


def test_reading_out_before_writing_it_is_caught():
    def gemv(W, x, out):
        out += W @ x

    assert "[0] was never set, or only added to" in str(ask(gemv))


def test_numbers_that_differ_are_told_apart():
    assert differs("y[0]", 1.25, 2) == "y[0] is 1.25, expected 2"
    assert differs("y[0]", np.float32(0.1), 0.1) == ("y[0] is 0.100000001, expected 0.1 (the same, rounded to float32)")
    assert differs("y[0]", 2.510831, 2.51083109) == (
        "y[0] is 2.510831, expected 2.5108311 (right to 7 digits: is something rounded on the way?)"
    )
    assert differs("y[0]", np.nextafter(3.0, 4), 3.0).startswith("y[0] is 3.0000000000000004, expected 3 (")
    assert apart(0.1, 0.1) == ("0.1", "0.1") and apart(0.1, 0.1 + 1e-9, 3) == ("0.1", "0.100000001")
    for one, other in ((np.nan, 1.0), (np.inf, 1.0), (1.0, np.inf), (-np.inf, np.inf), (0.0, 1e-300)):
        assert differs("y", one, other) == f"y is {one:g}, expected {other:g}"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_was_never_set_is_known_from_what_became_nan(dtype):
    given = unset(3, dtype)
    assert given.dtype == dtype and np.isnan(given).all()
    assert is_unset(given[0]) and is_unset(given[0] + dtype(1))
    assert not is_unset(dtype(np.nan)) and not is_unset(dtype(np.inf) - dtype(np.inf)) and not is_unset(dtype(0))


def test_half_precision_is_caught():
    assert not ask(into(lambda W, x: W.astype(np.float16) @ x.astype(np.float16)))
    assert ask(into(lambda W, x: W.astype(np.float16) @ x.astype(np.float16)), tolerance=0.1)


def test_luck_on_uniform_inputs_is_caught():
    lucky = into(lambda W, x: np.full(W.shape[0], W.sum(axis=1)[0] * x[0]))
    assert ask(lucky, make_inputs=lambda rng, *shape: (np.ones(shape, np.float32), np.ones(shape[1], np.float32)))
    assert not ask(lucky)


def test_a_kernel_that_is_right_on_square_matrices_only_is_caught():
    def gemv(W, x, out):
        n = W.shape[0]
        out[...] = np.pad(W, ((0, 0), (0, max(0, n - W.shape[1]))))[:, :n] @ np.resize(x, n)

    assert ask(gemv, shapes=[(7, 7), (16, 16)]) and not ask(gemv)


@pytest.mark.parametrize(
    ("wrong", "shape"),
    [(lambda A: A, (2, 3)), (lambda A: A.T.ravel(), (6,)), (lambda A: None, ()), (sum, (3,))],
)
def test_a_result_of_another_shape_is_caught(wrong, shape):
    verdict = check(wrong, np.transpose, lambda rng, m, n: (rng.random((m, n)),), [(2, 3)])
    assert f"the result has shape {shape}, expected (3, 2)" in str(verdict)


def test_a_result_that_was_cut_to_whole_numbers_is_caught():
    assert not ask(lambda W, x: reference(W, x).astype(np.int64), out=None)
    assert not ask(into(lambda W, x: np.round(W @ x)))


def with_a(value):
    def make_inputs(rng, rows, cols):
        W, x = inputs(rng, rows, cols)
        W[-1, 0], x[0] = value, 1
        return W, x

    return make_inputs


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_must_pass_through(value):
    special = dict(make_inputs=with_a(value))
    assert ask(planted("right"), **special)
    assert not ask(into(lambda W, x: np.nan_to_num(reference(W, x), posinf=3e38, neginf=-3e38)), **special)
    assert not ask(into(lambda W, x: -reference(W, x)), **special)
    assert not ask(into(lambda W, x: np.full(len(W), value)), **special)


def test_infinity_of_the_other_sign_is_wrong():
    verdict = check(lambda x: -x, lambda x: x, lambda rng: (np.array([np.inf]),), [()])
    assert "[0] is -inf, expected inf" in str(verdict)


def test_a_changed_input_is_caught_in_any_place_and_dtype():
    def sorts(x, n):
        n.sort()
        return x

    verdict = check(sorts, lambda x, n: x, lambda rng, k: (rng.random(k), rng.permutation(k)), [(50,)])
    assert "input number 2 was changed" in str(verdict)


def test_integer_outputs_are_poisoned_and_guarded_too():
    def asks(kernel):
        five = lambda rng, n: (rng.integers(0, 9, n),)  # noqa: E731
        return check(kernel, lambda x: 2 * x, five, [(5,)], out=lambda n: ((n,), np.int32))

    def skips(x, out):
        out[1:] = 2 * x[1:]

    def overwrites(x, out):
        home = out.base
        home[:] = 0
        out[...] = 2 * x

    assert asks(lambda x, out: np.multiply(x, 2, out=out, casting="unsafe"))
    assert "[0] is" in str(asks(skips))
    assert "outside the output" in str(asks(overwrites))


def test_the_message_has_shape_count_and_the_first_five_indices_with_both_values():
    def wrong(A):
        B = A.copy()
        B.ravel()[2:10] = 99
        return B

    said = str(check(wrong, lambda A: A, lambda rng, m, n: (np.arange(12.0).reshape(m, n),), [(3, 4)]))
    assert said.startswith("wrong at shape 3 × 4 (seed ")
    assert "8 of 12 elements differ" in said
    pairs = re.findall(r"\[([\d, ]+)\] is (\S+), expected (\d+)", said)
    assert [(at, wanted) for at, got, wanted in pairs if got == "99"] == [
        *[("0, 2", "2"), ("0, 3", "3")],
        *[("1, 0", "4"), ("1, 1", "5"), ("1, 2", "6")],
    ]


def test_many_small_errors_are_told_with_indices_too():
    x = np.zeros(1000)
    x[0] = 100
    said = str(check(lambda x: x + 0.9e-3, lambda x: x, lambda rng: (x,), [()]))
    assert "1000 of 1000 elements differ" in said and "[0] is 100.001, expected 100; [1] is 0.0009" in said


def test_what_is_left_of_terms_that_cancel_is_not_held_against_a_kernel():
    def cancels(rng, n):
        x = rng.standard_normal(n).astype(np.float32)
        return (np.concatenate([x, -x]),)

    def total(x):  # in float32, and in another order
        return np.cumsum(np.sort(x))[-1:]

    assert check(total, lambda x: x.sum(dtype=np.float64, keepdims=True), cancels, [(50,)])
    assert not check(lambda x: total(x) + 2e-4, lambda x: x.sum(keepdims=True), cancels, [(50,)])


def test_small_outputs_are_judged_by_their_own_size():
    def small(rng, n):
        return (1e-6 * rng.standard_normal(n),)

    assert check(lambda x: x * (1 + 1e-7), lambda x: x, small, [(9,)], size=1e-6)
    assert not check(lambda x: 0 * x, lambda x: x, small, [(9,)], size=1e-6)
    assert not check(lambda x: x * (1 + 1e-3), lambda x: x, small, [(9,)], size=1e-6)
    one_off = np.where(np.arange(1 << 16) == 5, 1.0002, 1.0)
    assert not check(lambda x: x * one_off, lambda x: x, lambda rng: (np.full(1 << 16, 1e-6),), [()], size=1e-6)


def test_one_bad_element_among_many_is_caught():
    def wrong(x):
        return np.where(np.arange(x.size) == x.size - 1, x + 2e-4, x)

    assert not check(wrong, lambda x: x, lambda rng: (np.ones(1 << 16),), [()])


def test_it_stops_at_the_first_wrong_shape_and_names_it():
    verdict = ask(into(lambda W, x: W @ x if len(W) < 17 else 0 * W @ x), shapes=[(3, 3), (17, 2), (1, 1)])
    assert str(verdict).startswith("wrong at shape 17 × 2") and verdict.shapes == 2


def test_the_seed_in_the_message_repeats_the_failure():
    wrong = into(lambda W, x: np.where(W[:, 0] > 1.5, 0, W @ x))
    first = str(ask(wrong, shapes=[(100, 3)]))
    seed = int(re.search(r"seed (\d+)", first)[1])
    assert str(ask(wrong, shapes=[(100, 3)], seed=seed)) == first
    assert str(ask(wrong, shapes=[(100, 3)], seed=seed + 1)) != first


def test_inputs_are_drawn_anew_at_every_check_and_every_shape():
    seen = []

    def make_inputs(rng, n):
        seen.append(rng.random(n))
        return seen[-1:]

    for _ in range(2):
        check(lambda x: x, lambda x: x, make_inputs, [(3,), (3,)])
    assert len({tuple(x) for x in seen}) == 4


def test_no_shapes_is_no_verdict():
    with pytest.raises(ValueError, match="no shape"):
        check(reference, reference, inputs, [])


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_hostile_shapes(dimensions):
    shapes = hostile_shapes(dimensions, tile=16)
    assert len(set(shapes)) == len(shapes) and all(len(s) == dimensions for s in shapes)
    assert shapes[0] == (37, 61, 53, 41)[:dimensions]
    for axis in range(dimensions):
        assert {1, 2, 7, 15, 16, 17, 35, 1023} <= {s[axis] for s in shapes}
    assert hostile_shapes(dimensions, limit=3) == shapes[:3]
    assert {s[0] for s in hostile_shapes(dimensions, tile=8, long=99)} >= {7, 8, 9, 99}


def test_guards_surround_a_copy():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    inside = between_guards(x)
    assert np.array_equal(inside, x) and inside.flags.c_contiguous and not np.shares_memory(inside, x)
    home = inside.base
    assert np.isnan(home[:GUARD]).all() and np.isnan(home[-GUARD:]).all() and home.size == 6 + 2 * GUARD
    assert between_guards(np.empty((0, 3), np.float16)).shape == (0, 3)
