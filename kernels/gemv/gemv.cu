/* Rung 5, gemv: a block works on ROWS neighbouring rows at once. Each of its threads owns TILES
   words of every row, so a word of x, loaded once, serves ROWS words of W; and all ROWS * TILES
   loads of a thread are under way together. Blocks of 256 threads, three or more to a
   multiprocessor, keep about 96 KB in flight on each, W and x. Their loads sweep through W in order, which
   DRAM likes best, and a block that ends makes room for the next while its neighbours go on
   loading.

   New since vector:
   - ROWS rows a block instead of one a warp, added up in two steps: over the lanes (fold), then
     over the warps.
   - W is read past L1, so that x stays there for the blocks to come.
   - Programmatic dependent launch. Weights do not depend on the kernel before this one, so they are
     asked for while it still runs; griddepcontrol.wait then waits until it has ended, and only
     after that may x be read and y be written. In an ordinary launch the wait is over at once, and
     x may be asked for first (X_FIRST=1).

   Moves sizeof(T) * rows*cols bytes of W once; x comes from L1 or L2. 2*rows*cols flops.
   Compile with DTYPE, VEC (elements in a word of at most 16 bytes; cols and both addresses are
   multiples of it), TILES, ROWS (a power of two) and X_FIRST.
   Launch ceil(rows / ROWS) blocks of at most 256 threads, a multiple of 32. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
#ifndef VEC
#define VEC (16 / sizeof(DTYPE))
#endif
#ifndef TILES
#define TILES 2
#endif
#ifndef ROWS
#define ROWS 4
#endif
#ifndef X_FIRST
#define X_FIRST 0
#endif
using T = DTYPE;
constexpr int THREADS = 256; // at most
constexpr int BYTES = VEC * sizeof(T), PARTS = BYTES < 4 ? 1 : BYTES / 4;
struct Word { unsigned v[PARTS]; }; // VEC elements, as bits

/* Load a word of W, past L1: it is used once, and x should stay there. volatile keeps it before the
   wait below. */
__device__ Word stream(const T *from) {
    Word w;
    if constexpr (BYTES == 16)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(from));
    else if constexpr (BYTES == 8)
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w.v[0]), "=r"(w.v[1]) : "l"(from));
    else if constexpr (BYTES == 4)
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(w.v[0]) : "l"(from));
    else
        asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=r"(w.v[0]) : "l"(from)); // the upper half is 0
    return w;
}

/* Load a word of x. */
__device__ Word load(const T *from) {
    Word w;
    if constexpr (BYTES == 16) *(uint4 *)w.v = *(const uint4 *)from;
    else if constexpr (BYTES == 8) *(uint2 *)w.v = *(const uint2 *)from;
    else if constexpr (BYTES == 4) w.v[0] = *(const unsigned *)from;
    else w.v[0] = *(const unsigned short *)from;
    return w;
}

__device__ float to_float(unsigned bits, __nv_bfloat16) { return __uint_as_float(bits << 16); } // the upper half of a float
__device__ float to_float(unsigned bits, __half) { return __half2float(__ushort_as_half(bits)); }
__device__ float to_float(unsigned bits, float) { return __uint_as_float(bits); }

/* Element i of a word, as a float. */
__device__ float element(const Word &word, int i) {
    if (sizeof(T) == 4) return to_float(word.v[i], T());
    return to_float(word.v[i / 2] >> 16 * (i % 2) & 0xffff, T());
}

/* The next kernel may start once every block here has said so. It may do that early: what we write
   it only sees after its own wait. And as every thread here waits, the end of this kernel means
   that all those before it have ended too. */
#if __CUDA_ARCH__ >= 900
#define LET_THE_NEXT_KERNEL_START() asm volatile("griddepcontrol.launch_dependents;")
#define WAIT_FOR_THE_LAST_KERNEL() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define LET_THE_NEXT_KERNEL_START()
#define WAIT_FOR_THE_LAST_KERNEL()
#endif

/* Add up ROWS sums over the 32 lanes. Each of the first steps hands half of the sums to the other
   half of the lanes, so that ROWS = 4 takes 2 + 1 + 3 shuffles instead of 4 * 5. Lane l returns the
   total of row l / (32 / ROWS). */
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

extern "C" __global__ void __launch_bounds__(THREADS, 3)
gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    __shared__ float sums[ROWS][THREADS / 32];
    int t = threadIdx.x, threads = blockDim.x, lane = t % 32, warp = t / 32;
    long long first = (long long)blockIdx.x * ROWS, words = cols / VEC;
    float sum[ROWS] = {};
    LET_THE_NEXT_KERNEL_START();
    for (long long begin = 0; begin < words; begin += threads * TILES) { // once, unless the rows are very long
        const T *from = W + first * cols + (begin + t) * VEC, *xs = x + (begin + t) * VEC;
        int left = words - begin - t > threads * TILES ? threads * TILES : words - begin - t; // words, for this thread
        Word w[ROWS][TILES] = {}, u[TILES] = {}; // zeros past the end
        auto ask_for_x = [&] {
            if (begin == 0) WAIT_FOR_THE_LAST_KERNEL();
#pragma unroll
            for (int k = 0; k < TILES; k++)
                if (k * threads < left) u[k] = load(xs + k * threads * VEC);
        };
        if (X_FIRST) ask_for_x();
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < TILES; k++)
                if (first + r < rows && k * threads < left) w[r][k] = stream(from + r * cols + k * threads * VEC);
        if (!X_FIRST) ask_for_x();
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < TILES; k++)
#pragma unroll
                for (int i = 0; i < VEC; i++) sum[r] += element(w[r][k], i) * element(u[k], i);
    }
    float total = fold(sum, lane);
    if (lane % (32 / ROWS) == 0) sums[lane / (32 / ROWS)][warp] = total;
    __syncthreads();
    if (t < ROWS && first + t < rows) {
        float s = 0;
#pragma unroll
        for (int v = 0; v < THREADS / 32; v++)
            if (v < threads / 32) s += sums[t][v];
        y[first + t] = (T)s;
    }
}
