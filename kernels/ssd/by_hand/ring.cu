/* Chapter 15, rung 2: as rung 1, but tiles come ahead of time, through a ring of STAGES places.

   New since chunk: thread 0 asks for chunks ahead, into ring.full; all wait_full; and who has stored y releases the
   place. While one chunk is worked on, the next ones come.

   Shapes, bytes and launch: as rung 1. */
#include "one_head.cuh"

struct ManyChunks {
    Tiles tiles[STAGES];
    unsigned char scores[TILE];
    Decays decays;
    Ring<STAGES> ring;
};

extern "C" __global__ void __launch_bounds__(128)
ring(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap b,
     const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap y, const Dt *dt, const float *a,
     const Bias *dt_bias, const D *d_skip, int seqlen, int heads, int groups, long long dt_batch, long long dt_token,
     long long dt_head) {
    extern __shared__ __align__(1024) unsigned char memory[];
    ManyChunks &s = *reinterpret_cast<ManyChunks *>(memory);
    const Sizes sizes = plain_sizes(seqlen, heads, groups, dt_batch, dt_token, dt_head);
    const Head head(blockIdx.x, sizes, dt, a, dt_bias, d_skip);
    const int thread = threadIdx.x, lane = thread % 32, warp = warp_uniform(thread / 32);
    if (thread == 0) s.ring.init(1, 1); // thread 0 fills a place, and says when it is free
    clear_scores(s.scores, warp, lane);
    float state[THREAD_NUMBERS];
    clear(state);
    __syncthreads();
    Phase<STAGES> filling, reading;
    auto fill = [&](int chunk) {
        if (chunk >= sizes.chunks || thread != 0) return;
        s.ring.wait_empty(filling);
        ask_for(s.tiles[filling.stage], {x, b, c}, head, chunk, s.ring.full[filling.stage]);
        filling.advance();
    };
    for (int chunk = 0; chunk < STAGES; chunk++) fill(chunk);
    for (int chunk = 0; chunk < sizes.chunks; chunk++) {
        Tiles &tiles = s.tiles[reading.stage];
        if (warp == 0) write_decays(s.decays, head, sizes, chunk, lane); // 1
        s.ring.wait_full(reading);
        __syncthreads(); // decays are there
        score(s.scores, tiles, s.decays, head.skip, warp, lane); // 2
        __syncthreads(); // scores are there
        walk_chunk(state, tiles, s.scores, s.decays, thread); // 3 to 5
        __syncthreads(); // y is there, and nobody reads what the next chunk overwrites
        if (thread == 0) {
            store_tile(y, head.place(chunk), tiles.x, LEAVES_FIRST);
            store_commit();
            store_wait_read();
            s.ring.release(reading);
        }
        reading.advance();
        fill(chunk + STAGES);
    }
    if (thread == 0) store_wait();
}
