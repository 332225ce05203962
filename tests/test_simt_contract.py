"""Products and sums that become one multiply-add after PTX: as an H200 computed them, and by exact arithmetic."""

import zlib

import numpy as np

import simt

SOURCE = r"""
extern "C" __global__ void k(const float* a, const float* b, const float* c, float* y, float* z, float* w,
                             const double* d, double* e, float* v) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    y[i] = a[i] * b[i] - c[i];
    z[i] = c[i] - a[i] * b[i];
    float t = a[i] * c[i];
    w[i] = t - b[i] + t;
    e[i] = d[i] * d[i] - 1.0;
    v[i] = a[i] * b[i] - b[i] * c[i];
}
"""
H200 = [3937093653, 3925715617, 4140478767, 899103302, 2291522568]  # crc32 of y, z, w, e, v, read on the card
N = 4096


def run(source, options=()):
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(N).astype(np.float32) for _ in range(3))
    d = rng.standard_normal(N)
    y, z, w, v = (np.full(N, np.nan, np.float32) for _ in range(4))
    e = np.full(N, np.nan)
    simt.compile(source, options)["k"](N // 128, 128, a, b, c, y, z, w, d, e, v)
    return (a, b, c, d), (y, z, w, e, v)


def test_bit_equal_to_the_card():
    assert [zlib.crc32(out.tobytes()) for out in run(SOURCE)[1]] == H200


def test_one_rounding_by_default_and_two_without_fmad():
    (a, b, c, _), (y, *_) = run(SOURCE)
    once = (a.astype(float) * b - c).astype(np.float32)  # exact in float64 but for its own last bit
    twice = a * b - c
    assert (y == once).all() and (y != twice).any()
    assert (run(SOURCE, ("-fmad=false",))[1][0] == twice).all()


def test_a_product_that_is_also_stored_is_rounded():
    source = SOURCE.replace("v[i] = a[i] * b[i] - b[i] * c[i];", "v[i] = t;")
    (a, b, c, _), (_, _, w, _, v) = run(source)
    t = a * c
    assert (v == t).all() and (w == t - b + t).all()
