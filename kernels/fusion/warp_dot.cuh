/* A product of one row by one warp: any number of columns at any address, slowly. */
#pragma once
#include "../device/reduce.cuh"

/* w · x, or w · (x · norm) where norm is not null, and the squares of x. */
template <typename T>
__device__ __forceinline__ float warp_dot(const T *w, const T *x, const T *norm, int cols, int lane, float *squares) {
    float total = 0, square = 0;
    for (int c = lane; c < cols; c += 32) {
        float a = x[c];
        square += a * a;
        total += (float)w[c] * (norm ? a * (float)norm[c] : a);
    }
    *squares = warp_sum(square);
    return warp_sum(total);
}
