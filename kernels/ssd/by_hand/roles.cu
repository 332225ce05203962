/* Chapter 15, rung 3: a block has a pair of heads, and a role for each kind of work.

   New since ring: the roles of fused.cu, as they stand in its headers. Who brings tiles does nothing else, nor does who
   makes decays, or scores, or stores y; two warpgroups multiply, a head each. C B^T is made once for both heads, and a
   role may be chunks ahead of another.

   A pair is one block's, from its first chunk to its last: there is no pass 1, and no other block to wait for. So as
   many multiprocessors work as there are pairs.

   Compile with SHAPE (../shape.cuh) and SHARED_BYTES. Launch with THREADS on a block for each pair of the batch. */
#include "../bring.cuh"
#include "../decays.cuh"
#include "../multiply.cuh"
#include "../scores.cuh"
#include "plain_sizes.cuh"

constexpr int THREADS = 512;
constexpr int MULTIPLY_REGISTERS = 192, SCORE_REGISTERS = 72, BRING_REGISTERS = 56; // 2, 1 and 1 times: 512
constexpr int BRINGER = 14, STORER = 15; // warps

/* The role of one thread: all chunks of a pair. */
__device__ __forceinline__ void bring_pair(Shared &s, const Sizes &sizes, const Maps &maps, int pair) {
    Bringer bringer{s, sizes, maps};
    bringer.choose(pair);
    for (int i = 0; i < sizes.chunks; i++) bringer.bring((i == 0 ? FIRST : 0) | (i + 1 == sizes.chunks ? LAST : 0), i);
    bringer.bring(END, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
roles(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap b,
      const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap y, const Dt *dt, const float *a,
      const Bias *dt_bias, const D *d_skip, int seqlen, int heads, int groups, long long dt_batch, long long dt_token,
      long long dt_head) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    Sizes sizes = plain_sizes(seqlen, heads, groups, dt_batch, dt_token, dt_head);
    sizes.pairs = sizes.tickets = gridDim.x;
    const Chain no_chain(sizes, nullptr, nullptr);
    if (threadIdx.x == 0) s.init();
    share_out_evenly(s, sizes); // which rows are pairs
    __syncthreads();
    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = threadIdx.x / 32;
    if (warpgroup < 2) {
        take_registers<MULTIPLY_REGISTERS>();
        multiply(s, sizes, no_chain, warpgroup, d_skip, nullptr, nullptr, {}, threadIdx.x % 128);
    } else if (warpgroup == 2) {
        give_registers<SCORE_REGISTERS>();
        make_scores(s, d_skip, threadIdx.x % 128);
    } else {
        give_registers<BRING_REGISTERS>();
        if (warp < BRINGER) make_decays(s, sizes, warp - 12, dt, a, dt_bias, nullptr, threadIdx.x % 32);
        else if (threadIdx.x == 32 * BRINGER) bring_pair(s, sizes, {x, b, c, x}, blockIdx.x);
        else if (threadIdx.x == 32 * STORER) store_tiles(s, y);
    }
}
