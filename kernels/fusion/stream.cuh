/* Rows stream through shared memory, and each meets x: the loop that the kernels of this folder
   share.

   A block owns groups of R rows, every gridDim.x-th one. Its threads stand side by side along a
   row, with TILES words of 8 columns each, and keep G groups on their way with cp.async. One block
   of 512 threads, or several smaller ones, fill a multiprocessor: about 200 KB on their way. A
   thread reads only what it copied itself, so the ring needs no barrier. Left to each kernel: which
   rows are in a group, what is done to x, and what becomes of the sums.

   Compiled for   DTYPE  of weights and vectors: __half or __nv_bfloat16
                  TILES  words of a row for each thread
                  R      rows in a group, 1, 2 or 4
                  G      groups in the ring
   Shared memory  [G][R][TILES][threads] words of 16 bytes,
                  then [rows of the block][PITCH] partial sums

   Every kernel
   1. asks for its first weights, which no kernel writes;
   2. waits for the kernel before it;
   3. reads x;
   4. multiplies and adds.
   Under programmatic dependent launch (PDL), 1 overlaps with the end of the kernel before. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;
constexpr int VEC = 8, MAX_WARPS = 16, MAX_THREADS = 32 * MAX_WARPS;
constexpr int PITCH = MAX_WARPS + 1; // a row's partial sums: one of each warp, and one more (see gemv_residual.cu)

/* Programmatic dependent launch; cards before compute capability 9.0 have none, and their launches
   never overlap. */
__device__ __forceinline__ void let_the_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_the_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float to_float(unsigned bits, __nv_bfloat16) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float to_float(unsigned bits, __half) { return __half2float(__ushort_as_half(bits)); }

/* Eight neighbours as floats. A bfloat16 is the upper half of a float. */
__device__ __forceinline__ void widen(uint4 word, float *to) {
    unsigned pairs[] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < VEC; i++) to[i] = to_float(pairs[i / 2] >> 16 * (i % 2) & 0xffff, T());
}

__device__ __forceinline__ float sum_over_warp(float a) {
#pragma unroll
    for (int far = 16; far; far /= 2) a += __shfl_xor_sync(~0u, a, far);
    return a;
}

/* Sums of M numbers over the warp; lane l gets that of acc[l / (32 / M)]. The first steps hand half
   of the numbers to the other half of the lanes, so that M = 4 takes 2 + 1 + 3 shuffles instead of
   4 * 5. */
template <int M> __device__ __forceinline__ float sums_over_warp(float *acc) {
    const int lane = threadIdx.x % 32;
    int far = 16;
#pragma unroll
    for (int n = M / 2; n; n /= 2, far /= 2) {
        bool upper = lane & far;
#pragma unroll
        for (int r = 0; r < n; r++) {
            float mine = upper ? acc[r + n] : acc[r], yours = upper ? acc[r] : acc[r + n];
            acc[r] = mine + __shfl_xor_sync(~0u, yours, far);
        }
    }
    for (; far; far /= 2) acc[0] += __shfl_xor_sync(~0u, acc[0], far);
    return acc[0];
}

/* What a thread holds of a vector (cols,), as floats; zeros past the end. */
template <int N> struct Piece {
    float at[N][VEC];

    __device__ __forceinline__ void load(const T *x, int cols) {
        const int t = threadIdx.x, threads = blockDim.x;
#pragma unroll
        for (int k = 0; k < N; k++)
            widen(k * threads + t < cols / VEC ? __ldcg(reinterpret_cast<const uint4 *>(x) + k * threads + t) : uint4{},
                  at[k]);
    }

    /* Multiply with the weights of a norm. Returns the thread's part of the sum of squares from before. */
    __device__ __forceinline__ float times(const Piece &weight) {
        float squares = 0;
#pragma unroll
        for (int k = 0; k < N; k++)
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                squares += at[k][i] * at[k][i];
                at[k][i] *= weight.at[k][i];
            }
        return squares;
    }
};

/* L2 policy for weights: they are read once, so they are the first that may go. */
__device__ __forceinline__ unsigned long long read_once() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Start to copy the thread's N words of M rows to its place in a slot. Without the hint L2::128B,
   the matrices of a feed-forward block take a quarter longer on an H200; with L2::256B, a tenth. */
template <int M, int N, class From>
__device__ __forceinline__ void ask_rows(uint4 *slot, From from, int words, unsigned long long policy) {
    const int t = threadIdx.x, threads = blockDim.x;
#pragma unroll
    for (int r = 0; r < M; r++) {
        auto row = reinterpret_cast<const uint4 *>(from(r));
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k * threads + t < words)
                asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(
                                 (unsigned)__cvta_generic_to_shared(slot + (r * N + k) * threads)),
                             "l"(row + k * threads + t), "l"(policy) : "memory");
    }
}

/* Multiply M rows in a slot with x. Returns the warp's sum of row l / (32 / M) in lane l. */
template <int M, int N>
__device__ __forceinline__ float multiply_rows(const uint4 *slot, const Piece<N> &x, int words) {
    const int t = threadIdx.x, threads = blockDim.x;
    float acc[M] = {};
#pragma unroll
    for (int r = 0; r < M; r++)
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k * threads + t < words) {
                float w[VEC];
                widen(slot[(r * N + k) * threads], w);
#pragma unroll
                for (int i = 0; i < VEC; i++) acc[r] += w[i] * x.at[k][i];
            }
    return sums_over_warp<M>(acc);
}

#ifdef G
/* row_at(group, r): where row r of a group begins. It must be a row that exists, past the end of
   the last group too. */
template <class RowAt> struct Stream {
    static constexpr int SLOT = R * TILES; // words of a thread
    const RowAt row_at;
    const int groups, words; // in all; of a row
    uint4 *ring;             // the thread's place in it
    float *partial;          // [rows of the block][PITCH]
    int next;                // the group to be asked for
    unsigned long long policy;

    __device__ __forceinline__ Stream(RowAt row_at, int groups, int cols, uint4 *shared)
        : row_at(row_at), groups(groups), words(cols / VEC), ring(shared + threadIdx.x),
          partial(reinterpret_cast<float *>(shared + G * SLOT * (int)blockDim.x)), next(blockIdx.x),
          policy(read_once()) {}

    __device__ __forceinline__ void ask(int slot) {
        if (next < groups) {
            auto from = [&](int r) { return row_at(next, r); };
            ask_rows<R, TILES>(ring + slot * SLOT * (int)blockDim.x, from, words, policy);
            next += gridDim.x;
        }
        asm volatile("cp.async.commit_group;" ::: "memory"); // an empty one too, so that G - 1 are always behind
    }

    __device__ __forceinline__ void fill() {
        for (int slot = 0; slot < G; slot++) ask(slot);
    }

    /* partial[l][w] = what warp w has of the sum of the block's l-th row. */
    __device__ __forceinline__ void multiply(const Piece<TILES> &x) {
        const int t = threadIdx.x;
        float *to = partial + t % 32 / (32 / R) * PITCH + t / 32;
        int slot = 0;
        for (int group = blockIdx.x; group < groups; group += gridDim.x, to += R * PITCH) {
            asm volatile("cp.async.wait_group %0;" ::"n"(G - 1) : "memory");
            float total = multiply_rows<R, TILES>(ring + slot * SLOT * (int)blockDim.x, x, words);
            ask(slot);
            slot = slot + 1 < G ? slot + 1 : 0;
            if (t % (32 / R) == 0) *to = total;
        }
    }

    /* How many rows the block has, and which of all groups its l-th row belongs to. */
    __device__ __forceinline__ int owned() const {
        return (groups - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x * R;
    }
    __device__ __forceinline__ int group_of(int l) const { return l / R * gridDim.x + blockIdx.x; }

    /* The sum of the block's l-th row, of `n` partial sums. */
    __device__ __forceinline__ float sum(int l, int n) const {
        float total = 0;
        for (int w = 0; w < n; w++) total += partial[l * PITCH + w];
        return total;
    }
};
#endif

/* 1 / √(mean of squares + eps), of the warps' sums of squares. */
__device__ __forceinline__ float norm_scale(const float *squares, int cols, float eps) {
    float total = 0;
    for (int w = 0; w < blockDim.x / 32; w++) total += squares[w];
    return rsqrtf(total / cols + eps);
}

__device__ __forceinline__ float silu(float a) { return a / (1 + __expf(-a)); }

/* Any number of columns at any address: one warp adds up w · x, or w · (x · norm), and the squares
   of x. */
__device__ __forceinline__ float warp_dot(const T *w, const T *x, const T *norm, int cols, float *squares) {
    float total = 0, square = 0;
    for (int c = threadIdx.x % 32; c < cols; c += 32) {
        float a = x[c];
        square += a * a;
        total += (float)w[c] * (norm ? a * (float)norm[c] : a);
    }
    *squares = sum_over_warp(square);
    return sum_over_warp(total);
}
