/* The products of a layer: where the rows of a group lie, and what becomes of the sums. */
#pragma once
#include "../device/math.cuh"
#include "stream.cuh"

/* W_q, W_k and W_v as one matrix that lies in three places, for a normed x. */
struct QkvProduct {
    const T *W_q, *W_k, *W_v;
    int q_rows, k_rows, rows, cols; // rows: of all three

    __device__ __forceinline__ const T *row(int row) const {
        const T *W = W_q;
        if (row >= q_rows + k_rows) W = W_v, row -= q_rows + k_rows;
        else if (row >= q_rows) W = W_k, row -= q_rows;
        return W + (long long)row * cols;
    }
    __device__ __forceinline__ int groups() const { return (rows + S::ROWS - 1) / S::ROWS; }
    /* Row r of a group; past the end, the last row. */
    __device__ __forceinline__ const T *row(int group, int r) const { return row(min(group * S::ROWS + r, rows - 1)); }

    template <class Stream>
    __device__ __forceinline__ void store(const Stream &sums, Share<S::ROWS> share, T *out, float scale) const {
        share.each(sums.thread, [&](int row, int i) { out[row] = (T)(sums.sum(i, sums.warps) * scale); });
    }
};

/* W_gate and W_up, for a normed x: half of a group's rows come from the one and half, of the same numbers, from the
   other. So a gate and its partner end up in one block. */
struct GluProduct {
    static constexpr int HALF = S::ROWS / 2;
    const T *W_gate, *W_up;
    int rows, cols; // of each

    __device__ __forceinline__ int groups() const { return (rows + HALF - 1) / HALF; }
    __device__ __forceinline__ const T *row(int group, int r) const {
        return (r < HALF ? W_gate : W_up) + (long long)min(group * HALF + r % HALF, rows - 1) * cols;
    }

    template <class Stream>
    __device__ __forceinline__ void store(const Stream &sums, Share<HALF> share, T *out, float scale) const {
        share.each(sums.thread, [&](int row, int i) {
            const int l = i / HALF * S::ROWS + i % HALF; // where the gate is; its partner is HALF further
            const float gate = sums.sum(l, sums.warps) * scale, up = sums.sum(l + HALF, sums.warps) * scale;
            out[row] = (T)(silu(gate) * up);
        });
    }
};

/* W x, added to a residual: it is one more partial sum of its row. */
template <int ROWS> struct ResidualProduct {
    const T *W;
    int rows, cols;

    __device__ __forceinline__ int groups() const { return (rows + ROWS - 1) / ROWS; }
    __device__ __forceinline__ const T *row(int group, int r) const {
        return W + (long long)min(group * ROWS + r, rows - 1) * cols;
    }

    /* In front of the product, so that nothing waits for it behind. */
    template <class Stream>
    __device__ __forceinline__ void load(const Stream &sums, Share<ROWS> share, const T *residual) const {
        share.each(sums.thread, [&](int row, int i) { sums.partial[i * PITCH + sums.warps] = residual[row]; });
    }
    template <class Stream> __device__ __forceinline__ void store(const Stream &sums, Share<ROWS> share, T *out) const {
        share.each(sums.thread, [&](int row, int i) { out[row] = (T)sums.sum(i, sums.warps + 1); });
    }
};
