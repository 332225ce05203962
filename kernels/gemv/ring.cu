/* Rung 6, ring: the product under programmatic dependent launch. One block of up to 512 threads on
   each multiprocessor asks for as much of its share of W as it can hold, about 256 KB, before it
   waits for the kernel ahead of it.

   New since gemv:
   - A block stays. It owns groups of ROWS neighbouring rows, every gridDim.x-th one, and keeps
     DEPTH of them on their way into shared memory with cp.async, and at first one more into
     registers. A thread reads only what it copied itself, so the ring needs no barrier; there is
     one in the kernel, before the warps' sums are added up. With so much shared memory a block has
     its multiprocessor to itself: a block of the next kernel starts there when this one ends, while
     others still work.
   - x comes late: it stands in line behind all that has been asked for, and a whole ring of weights
     waits for it. mma.m16n8k16 does the arithmetic of 4 columns of 2 rows for all lanes in one
     instruction. (With PDL, ordinary multiply-adds take no longer on an H200.) It is meant for tiles. Here row g of A is what the 4
     lanes 4g .. 4g+3 hold of one row of W, row g + 8 what they hold of the next, and column g of B
     what the same lanes hold of x: their product is D[g][g], and D[g+8][g]. The rest of D mixes
     lanes that have nothing to do with each other, and is thrown away.

   Moves the 2 * rows*cols bytes of W once (some rows twice if ROWS does not divide rows); each block
   reads x once. 2*rows*cols flops that count, 8 times as many done. Compile with DTYPE (__half or
   __nv_bfloat16), THREADS (a multiple of 32), TILES (words of 8 columns a thread has of a row;
   THREADS * TILES words hold a row), ROWS (2, 4 or 8, and no more than rows), DEPTH, and AHEAD, the
   slots that are filled before the wait: DEPTH, or one less where a block has no more groups than it
   can hold. Launch at most ceil(rows / ROWS) blocks of THREADS. Shared memory:
   [DEPTH][ROWS][TILES][THREADS] words, and then [rows of a block, in whole groups][PITCH] floats.
   cols and both addresses are multiples of a word. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE __nv_bfloat16 /* or __half */
#endif
#ifndef THREADS
#define THREADS 512
#endif
#ifndef TILES
#define TILES 1
#endif
#ifndef ROWS
#define ROWS 8
#endif
#ifndef DEPTH
#define DEPTH 3
#endif
#ifndef AHEAD
#define AHEAD DEPTH
#endif
using T = DTYPE;
constexpr int VEC = 8, WARPS = THREADS / 32;
constexpr int PITCH = WARPS | 1; // odd, so that 32 rows' sums lie in 32 banks
constexpr int SLOT = ROWS * TILES * THREADS; // words

/* d += A * B, a warp's. a: two columns of a row, those of the next row, two more of both; x: what
   they meet. */
__device__ void mma(float *d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned x0, unsigned x1,
                    __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(x0), "r"(x1));
}
__device__ void mma(float *d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned x0, unsigned x1, __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(x0), "r"(x1));
}

/* Add up ROWS sums over the 32 lanes, as gemv does. Lane l returns the total of row l / (32 /
   ROWS). */
__device__ float fold(float *sum, int lane) {
    int far = 16;
#pragma unroll
    for (int n = ROWS / 2; n > 0; n /= 2, far /= 2) {
        bool upper = lane & far;
#pragma unroll
        for (int r = 0; r < n; r++) {
            float mine = upper ? sum[r + n] : sum[r], yours = upper ? sum[r] : sum[r + n];
            sum[r] = mine + __shfl_xor_sync(0xffffffff, yours, far);
        }
    }
    for (; far > 0; far /= 2) sum[0] += __shfl_xor_sync(0xffffffff, sum[0], far);
    return sum[0];
}

/* A warp's sums of a group of rows: that of row l / (32 / ROWS) in lane l. All lanes take part. */
__device__ float multiply(const uint4 (&w)[ROWS][TILES], const uint4 (&x)[TILES], int lane) {
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
        float d[4] = {};
#pragma unroll
        for (int k = 0; k < TILES; k++) {
            uint4 a = w[r][k], b = w[r + 1][k];
            mma(d, a.x, b.x, a.y, b.y, x[k].x, x[k].y, T());
            mma(d, a.z, b.z, a.w, b.w, x[k].z, x[k].w, T());
        }
        // d holds D[g][2q], D[g][2q + 1], and the same of row g + 8, in lane 4g + q
        bool mine = lane % 4 == lane / 8, odd = lane / 4 % 2;
        sum[r] = !mine ? 0 : odd ? d[1] : d[0];
        sum[r + 1] = !mine ? 0 : odd ? d[3] : d[2];
    }
    return fold(sum, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    extern __shared__ __align__(16) uint4 ring[];
    auto sums = (float (*)[PITCH])(ring + DEPTH * SLOT); // [rows of the block][PITCH]
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, words = cols / VEC;
    const int groups = (rows + ROWS - 1) / ROWS, blocks = gridDim.x;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;"); // see gemv.cu
#endif
    unsigned long long once; // W is read once, so it is the first that may leave L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));

    /* The thread's first word of a group. The last group is the last ROWS rows: some may be in the one before too. */
    auto first_row = [&](int group) { return min((long long)group * ROWS, rows - ROWS); };
    auto at = [&](int group) { return (const uint4 *)W + first_row(group) * words + t; };
    int next = blockIdx.x + blocks; // the group to be asked for
    auto ask = [&](int slot) {
        if (next < groups) {
            auto from = at(next);
            auto to = (unsigned)__cvta_generic_to_shared(ring + slot * SLOT + t);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int k = 0; k < TILES; k++)
                    if (k * THREADS + t < words)
                        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(
                                         to + (r * TILES + k) * THREADS * 16),
                                     "l"(from + r * words + k * THREADS), "l"(once) : "memory");
            next += blocks;
        }
        asm volatile("cp.async.commit_group;" ::: "memory"); // an empty one too, so that DEPTH - 1 are always behind
    };

    // 1. ask for weights: the first group into registers, the next into the ring
    uint4 w[ROWS][TILES] = {}, u[TILES] = {}; // zeros past the end of a row
    auto from = at(blockIdx.x);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int k = 0; k < TILES; k++)
            if (k * THREADS + t < words)
                asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(w[r][k].x), "=r"(w[r][k].y), "=r"(w[r][k].z), "=r"(w[r][k].w)
                             : "l"(from + r * words + k * THREADS));
#pragma unroll 1
    for (int slot = 0; slot < AHEAD; slot++) ask(slot);

    // 2. wait for the kernel ahead, 3. read x
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#pragma unroll
    for (int k = 0; k < TILES; k++)
        if (k * THREADS + t < words) u[k] = __ldcg((const uint4 *)x + k * THREADS + t);

#pragma unroll
    for (int slot = AHEAD; slot < DEPTH; slot++) ask(slot); // behind x, which so comes earlier

    // 4. multiply; a slot that was read is asked for again, for the group DEPTH turns later
    float *to = &sums[lane / (32 / ROWS)][warp];
    auto keep = [&](float sum) {
        if (lane % (32 / ROWS) == 0) *to = sum;
        to += ROWS * PITCH;
    };
    keep(multiply(w, u, lane));
    int slot = 0;
#pragma unroll 1
    for (int group = blockIdx.x + blocks; group < groups; group += blocks) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < TILES; k++)
                if (k * THREADS + t < words) w[r][k] = ring[slot * SLOT + (r * TILES + k) * THREADS + t];
        ask(slot);
        slot = slot + 1 < DEPTH ? slot + 1 : 0;
        keep(multiply(w, u, lane));
    }

    // 5. add up the warps' sums
    __syncthreads();
    int owned = (groups - (int)blockIdx.x + blocks - 1) / blocks * ROWS; // rows
    for (int l = t; l < owned; l += THREADS) {
        int group = l / ROWS * blocks + blockIdx.x;
        long long row = first_row(group) + l % ROWS;
        float total = 0;
#pragma unroll
        for (int v = 0; v < WARPS; v++) total += sums[l][v];
        if (row >= (long long)group * ROWS) y[row] = (T)total; // else it is the group before's
    }
}
