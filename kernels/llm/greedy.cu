/* The likeliest token becomes the next one, and the text is one longer: token = the place of the largest logit, the
   first of equal ones; kv_len += 1. So a graph of a token needs nothing of the host before it is replayed.

   logits (vocab,), token (1,) int64, kv_len (1,) int32, state (2,) 64-bit: the best so far, and how many blocks are
   through; zeros before, and again behind. NaN counts as the largest, as it does for PyTorch.

   A block looks at every gridDim.x-th piece, and the last of all to be through writes. Since compute capability 7.0. */
#include "../device/grid.cuh"
#include "../device/pdl.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;
constexpr int THREADS = 256;

/* Larger for a larger logit, and of equal ones for the earlier. */
__device__ __forceinline__ unsigned long long rank_of(float logit, unsigned place) {
    const unsigned bits = __float_as_uint(logit == 0 ? 0.f : logit); // -0 is 0
    const unsigned order = logit != logit ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (unsigned long long)order << 32 | ~place;
}
using Rank = unsigned long long;
__device__ __forceinline__ Rank larger(Rank a, Rank b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(THREADS)
greedy(const T *logits, long long *token, int *kv_len, unsigned long long *state, int vocab) {
    __shared__ unsigned long long of_warp[THREADS / 32];
    let_next_kernel_start();
    wait_for_previous_kernel();
    unsigned long long best = 0;
    // unsigned: vocab may be all that an int holds, and the last step goes beyond
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < (unsigned)vocab; i += gridDim.x * THREADS)
        best = larger(best, rank_of((float)logits[i], i));
    for (int mask = 16; mask; mask /= 2) best = larger(best, __shfl_xor_sync(~0u, best, mask));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < THREADS / 32; warp++) best = larger(best, of_warp[warp]);
    atomicMax(state, best);
    unsigned *const through = reinterpret_cast<unsigned *>(state + 1);
    if (add_acquire_release(through, 1) + 1 == gridDim.x) {
        *token = (unsigned)~load_acquire(state);
        *kv_len += 1;
        state[0] = state[1] = 0; // the next launch is behind the end of this one
    }
}
