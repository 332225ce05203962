/* Latent attention on Hopper's tensor cores (sm_90a): keys and values are products of one and the same tile, which TMA
   brings while others are multiplied.

   64 heads of a sequence are the rows of all products. Their result, 64 x 512 sums, takes the registers of two
   warpgroups: each has a half of the columns. Scores would be made twice, so the warpgroups take turns: warpgroup w has
   every second tile, makes S = Q K^T and weights of it, adds its half of W V with weights as they stand in registers,
   and hands them to the other through shared memory, for the other half. So while one goes through a softmax, the
   tensor cores work for the other:

       warpgroup 0:  S0 | weights of S0 | W0 V0 left  | S2, amid it W1 V1 left | weights of S2 | W2 V2 left ...
       warpgroup 1:     S1, amid it W0 V0 right | weights of S1 | W1 V1 right | S3, amid it W2 V2 right ...

   Amid it: scores begin with the parts of a tile that have come, and while its last parts are on their way there is the
   other's tile to multiply with (PARTS_BEFORE).

   A tile is 74 KB, so are the queries, and there is room for two tiles. Half of a tile's place is free as soon as one
   warpgroup has multiplied with it, and the next tile's scores begin with the parts that came there (hopper_plan.cuh).

   Blocks stay, and have equal shares of all tiles of all sequences, by lengths as they are (line.cuh). Blocks with the
   same share, for other heads, are neighbours, and read the same tiles; with MULTICAST they are a cluster, and each
   brings half of the parts for both. With fewer than 64 heads, products are made for rows that nobody needs.

   2 * (576 + 512) flops for each head, up to a whole number of 64, and token. Moves 1152 bytes for each token, q and
   out once, and 4 * (512 + 2) bytes for each head of a segment that is not a whole sequence.

   Compile with SHAPE (64 heads, tiles of 64) and PLAN. Launch THREADS, sizeof(Shared) bytes, head_tiles * most_shares
   blocks, at most one for each multiprocessor, head_tiles = ceil(n_heads / 64); with MULTICAST in clusters of two. q:
   (batch, n_heads, 576), cache: (batch, kv_len, 576), or (n_pages, 64, 576) and a table, both in boxes of (1, 64, 64),
   swizzled by 128 bytes; rows: the cache itself. scale: positive, times log2(e). */
#include "hopper_load.cuh"
#include "hopper_store.cuh"

// A block starts with 168 for each of its threads, and has no more to share out.
constexpr int MULTIPLY_REGISTERS = 232, LOAD_REGISTERS = 3 * 168 - WARPGROUPS * MULTIPLY_REGISTERS;

// Scores end behind the other's values, which need not be waited for then.
constexpr bool SPLIT = PARTS_BEFORE < PARTS;

/* A warpgroup that multiplies. */
struct Multiply {
    Shared &s;
    const int warpgroup, thread;
    const float to_log2;
    unsigned before = 0; // tiles of the segments before this one
    RowSums sums;
    Values o;

    __device__ __forceinline__ unsigned char *side(int slot) { return s.tiles[slot][SIDE_PARTS * warpgroup]; }

    /* The warpgroup's side of a slot may be filled again; and where weights lay that it has multiplied with. */
    __device__ __forceinline__ void release(int slot) {
        Barrier &empty = s.empty[slot][warpgroup];
        if constexpr (MULTICAST) {
            if (thread % 32 < 2) arrive_at(empty, thread % 32);
        } else if (thread % 32 == 0) empty.arrive();
    }
    __device__ __forceinline__ void release_queries() {
        if (thread % 32 == 0) s.q_ring.empty[0].arrive();
    }
    /* In a sequence's last tile, before the product with its values. */
    __device__ __forceinline__ void clear(int slot, int tokens) {
        if (tokens == TILE) return;
        clear_behind(side(slot), tokens, thread);
        fence_async_proxy();
        named_barrier<128>(OWN + warpgroup);
    }
    /* Start the product with the values of a tile whose weights the other makes. */
    __device__ __forceinline__ void start_others(int slot, bool more, int tokens) {
        named_barrier<256>(WEIGHTS + slot);
        if (sums.take(s.maximum[slot], thread) && more) sums.rescale(o);
        clear(slot, tokens);
        start_values(o, shared_address(s.tiles[slot][ROTATED]), shared_address(side(slot)), more);
    }
    /* The segment's tile t, of its own; and the one before it, of the other. */
    template <bool FIRST> __device__ __forceinline__ void multiply_own(const Work &work, int t) {
        const int slot = warpgroup, tokens = t + 1 == work.tiles ? work.last : TILE;
        Scores scores;
        Weights weights;
        const unsigned parity = (before + t) / SLOTS % 2;
        start_scores<0, PARTS_BEFORE>(scores, s, slot, parity);
        if constexpr (!FIRST) start_others(1 - slot, t > 1, TILE);
        start_scores<PARTS_BEFORE, PARTS>(scores, s, slot, parity);
        if (!FIRST && SPLIT) {
            wgmma_wait<1>();
            keep(o);
            release(1 - slot);
        }
        wgmma_wait<FIRST || SPLIT ? 0 : 1>();
        keep(scores);
        if (t + SLOTS >= work.tiles) release_queries();
        if (tokens < TILE) mask(scores, tokens, thread % 32);
        const bool rises = sums.online_softmax(scores, to_log2);
        round_weights(weights, scores);
        sums.tell(s.maximum[slot], thread);
        named_barrier<128>(OWN + warpgroup); // all warps are done with what lies where weights go
        store_weights(shared_address(s.tiles[slot][ROTATED]), weights, thread);
        fence_async_proxy();
        named_barrier_arrive<256>(WEIGHTS + slot);
        if (!FIRST && !SPLIT) {
            wgmma_wait<0>();
            keep(o);
            release(1 - slot);
        }
        if (!FIRST && rises) sums.rescale(o);
        clear(slot, tokens);
        start_values(o, weights, shared_address(side(slot)), !FIRST);
        wgmma_wait<0>();
        keep(o);
        release(slot);
    }
    /* All tiles of a segment. */
    __device__ __forceinline__ void walk(const Work &work) {
        const int n = warp_uniform(work.tiles), first = (before + warpgroup) % 2; // own ones: first, first + 2, ...
        sums = RowSums();
        if (first >= n) release_queries();
        if (first == 0) multiply_own<true>(work, 0);
#pragma unroll 1
        for (int t = first == 0 ? SLOTS : 1; t < n; t += SLOTS) multiply_own<false>(work, t);
        if ((n - first) % SLOTS == 0) { // the last one is the other's
            start_others(1 - warpgroup, n > 1, work.last);
            wgmma_wait<0>();
            keep(o);
            release(1 - warpgroup);
        }
        before += n;
    }
};

__device__ __forceinline__ void multiply(Shared &s, const Outputs &to, float to_log2, int head_tile, int warpgroup,
                                         int thread) {
    Multiply own{s, warpgroup, thread, to_log2};
    Phase<SEGMENTS> phase;
    for (int turn = 0;; turn ^= 1, phase.advance()) {
        s.work_ring.wait_full(phase);
        const Work work = s.work[phase.stage];
        __syncwarp();
        if (thread % 32 == 0) s.work_ring.release(phase);
        if (work.tiles == 0) return;
        s.q_ring.full[0].wait(turn);
        own.walk(work);
        store(s, own.o, own.sums, work, to, head_tile, turn, warpgroup, thread);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap cache, const T *rows, T *out,
       float *partial_out, float2 *max_and_sum, const int *kv_lens, const int *table, int kv_len, int batch,
       int n_heads, int n_pages, int max_pages, int most_shares, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int warpgroup = warp_uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    const int head_tiles = (n_heads + HEADS - 1) / HEADS, share = blockIdx.x / head_tiles;
    const int head_tile = blockIdx.x - share * head_tiles;
    let_next_kernel_start();
    if (threadIdx.x == 0) s.init();
    if (threadIdx.x == 128 * WARPGROUPS) prefetch(q), prefetch(cache);
    if constexpr (MULTICAST) cluster_barrier();
    else __syncthreads();
    if (warpgroup == WARPGROUPS) {
        give_registers<LOAD_REGISTERS>();
        const Sequences sequences{kv_lens, kv_len, batch};
        const Problem problem{sequences, rows, table, n_pages, max_pages, most_shares, head_tiles, head_tile};
        if (thread < 32) bring_tiles(s, q, cache, problem, share, thread);
        else wait_for_previous_kernel();
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        wait_for_previous_kernel();
        multiply(s, {out, partial_out, max_and_sum, n_heads}, scale, head_tile, warpgroup, thread);
    }
    __syncwarp();
    if constexpr (MULTICAST) cluster_barrier(); // the other may still bring something here, or make room
}
