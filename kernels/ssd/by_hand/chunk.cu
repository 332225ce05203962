/* Chapter 15, rung 1: one warpgroup has one head, and walks its chunks from the first to the last. At each chunk it
   does all five steps itself, one behind the other, with the products of Hopper: wgmma, of tiles that TMA has brought.
   The state stays in registers. Nobody works ahead: while tiles come nothing is multiplied, and while dt becomes decays
   three of four warps wait.

   x, y (batch, seqlen, heads, 64), B, C (batch, seqlen, groups, STATE); maps as fused.cu has them. Moves x, y and dt
   once, B and C once for each head (from L2 while they fit there). Compile with SHAPE (../shape.cuh); launch with 128
   threads on a block for each head of the batch. */
#include "one_head.cuh"

struct OneChunk {
    Tiles tiles;
    unsigned char scores[TILE];
    Decays decays;
    Barrier full;
};

extern "C" __global__ void __launch_bounds__(128)
chunk(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap b,
      const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap y, const Dt *dt, const float *a,
      const Bias *dt_bias, const D *d_skip, int seqlen, int heads, int groups, long long dt_batch, long long dt_token,
      long long dt_head) {
    extern __shared__ __align__(1024) unsigned char memory[];
    OneChunk &s = *reinterpret_cast<OneChunk *>(memory);
    const Sizes sizes = plain_sizes(seqlen, heads, groups, dt_batch, dt_token, dt_head);
    const Head head(blockIdx.x, sizes, dt, a, dt_bias, d_skip);
    const int thread = threadIdx.x, lane = thread % 32, warp = warp_uniform(thread / 32);
    if (thread == 0) s.full.init(1), Barrier::init_done();
    clear_scores(s.scores, warp, lane);
    float state[THREAD_NUMBERS];
    clear(state);
    __syncthreads();
    unsigned parity = 0;
    for (int chunk = 0; chunk < sizes.chunks; chunk++, parity ^= 1) {
        if (thread == 0) ask_for(s.tiles, {x, b, c}, head, chunk, s.full);
        if (warp == 0) write_decays(s.decays, head, sizes, chunk, lane); // 1
        s.full.wait(parity);
        __syncthreads(); // decays are there
        score(s.scores, s.tiles, s.decays, head.skip, warp, lane); // 2
        __syncthreads(); // scores are there
        walk_chunk(state, s.tiles, s.scores, s.decays, thread); // 3 to 5
        __syncthreads(); // y is there, and nobody reads what the next chunk overwrites
        if (thread == 0) {
            store_tile(y, head.place(chunk), s.tiles.x, LEAVES_FIRST);
            store_commit();
            store_wait_read();
        }
    }
    if (thread == 0) store_wait();
}
