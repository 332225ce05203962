/* A vector, spread over the registers of a block: a kernel's x, and the norm that it goes through. */
#pragma once
#include "../device/half2.cuh"
#include "../device/reduce.cuh"

constexpr int VEC = 8; // numbers in a word of 16 bytes

/* What a thread holds of a vector (cols,), as floats: every blockDim.x-th word, WORDS of them; zeros past the end. */
template <int WORDS> struct ThreadVector {
    float at[WORDS][VEC];

    template <typename T> __device__ __forceinline__ void load(const T *x, int cols, int thread) {
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const int word = k * (int)blockDim.x + thread;
            widen(word < cols / VEC ? __ldcg(reinterpret_cast<const uint4 *>(x) + word) : uint4{}, at[k], T());
        }
    }

    /* Multiply with the weight of a norm. Returns the thread's part of the sum of squares from before. */
    __device__ __forceinline__ float scale_and_square_sum(const ThreadVector &weight) {
        float squares = 0;
#pragma unroll
        for (int k = 0; k < WORDS; k++)
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                squares += at[k][i] * at[k][i];
                at[k][i] *= weight.at[k][i];
            }
        return squares;
    }
};

/* RMSNorm with the root taken last: apply in front of a product, scale behind it. */
struct Norm {
    float *squares; // in shared memory, of each warp

    template <int WORDS>
    __device__ __forceinline__ void apply(ThreadVector<WORDS> &x, const ThreadVector<WORDS> &weight, int thread) const {
        const float sum = warp_sum(x.scale_and_square_sum(weight));
        if (thread % 32 == 0) squares[thread / 32] = sum; // seen behind the product, which ends with a barrier
    }

    /* 1 / √(mean of squares + eps) */
    __device__ __forceinline__ float scale(int cols, float eps) const {
        float total = 0;
        for (int warp = 0; warp < blockDim.x / 32; warp++) total += squares[warp];
        return rsqrtf(total / cols + eps);
    }
};
