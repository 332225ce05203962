/* The sums of all splits of few_rows.cu or many_rows.cu: parts (SPLITS, count) -> y (count), four of a thread.

   Its blocks fit beside those of the kernel before it where these leave registers.

   Compile with X, the type of y, and SPLITS. Launch ceil(count / (4 * THREADS)) blocks of THREADS. */
#include "../device/pdl.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef X
#define X __half
#define SPLITS 4
#endif
constexpr int THREADS = 128;

/* Numbers i .. i + 3 of (SPLITS, count), added up over the first; WORDS: they are one word of 16 bytes. */
template <bool WORDS> __device__ __forceinline__ float4 sum_of(const float *parts, long long i, long long count) {
    const long long last = count - 1 - i; // past the end the last one is read again
    float4 all = {};
#pragma unroll 8
    for (int split = 0; split < SPLITS; split++) { // several loads are asked for before the first is used
        const float *const at = parts + split * count + i;
        float4 part;
        if (WORDS)
            part = __ldcg(reinterpret_cast<const float4 *>(at));
        else
            part = {__ldcg(at), __ldcg(at + min(1ll, last)), __ldcg(at + min(2ll, last)), __ldcg(at + min(3ll, last))};
        all.x += part.x, all.y += part.y, all.z += part.z, all.w += part.w;
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS) merge(const float *parts, X *y, long long count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (i >= count) return;
    const bool words = count % 4 == 0; // each split's begins at one of 16 bytes
    const float4 all = words ? sum_of<true>(parts, i, count) : sum_of<false>(parts, i, count);
    const X four[4] = {(X)all.x, (X)all.y, (X)all.z, (X)all.w};
    if (words && reinterpret_cast<unsigned long long>(y) % 8 == 0) {
        unsigned raw[4];
#pragma unroll
        for (int k = 0; k < 4; k++) raw[k] = reinterpret_cast<const unsigned short &>(four[k]);
        *reinterpret_cast<uint2 *>(y + i) = {raw[0] | raw[1] << 16, raw[2] | raw[3] << 16};
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k < count) y[i + k] = four[k];
    }
}
