/* Attention of many queries over pages, bound by the tensor cores: new tokens of each request (APPEND), or runs of
   tokens that several requests share, with those that each has alone (SHARED). Compute capability 9.0 (sm_90a).

   - The rows of a product are pairs: a query, and one of the heads that share a kv head (append_shape.cuh). So keys
     and values are brought once for all of a group.
   - One warp brings pages by TMA, numbers from the table first (append_pages.cuh). Two warpgroups multiply, 64 rows
     each, S = Q K^T of a step of 128 tokens and O += W V, with weights as they stand in registers.
   - A step's scores are under way together with the values of the step before, and the softmax begins when the first
     of the two is there.
   - Two blocks may be a team. Neighbouring row tiles, which need the same tokens, go to both at the same time, so that
     the second finds in L2 what the first has asked for.
   - Blocks stay, and share out the work among them by lengths as they are (append_walk.cuh). The next segment's
     queries and pages are on their way while the last values are multiplied.
   - Where few rows look at many tokens, products wait for memory; others, elsewhere on the card at the same time, do
     not.
   - Only steps that cross what a row may see pay for a mask.

   4 * HEAD_DIM flops for each pair and token that it sees. Moves keys and values of an item once for each unit, q and
   out once, and 4 * (HEAD_DIM + 2) bytes for each row of a part.

   Compile with SHAPE. Launch THREADS, sizeof(Shared) bytes, whole teams, at most as many blocks as there are
   multiprocessors. k, v: (n_pages * n_kv_heads, PAGE_SIZE / 8, HALVES, 8, 64),
   boxes of a whole page, and, as k8 and v8, of eight tokens; swizzled. q, out: (queries of all items, n_heads,
   HEAD_DIM); SHARED: q (q_rows, n_heads, HEAD_DIM), and list (queries,) says which rows; what is outside of q is the
   nearest that is not; count: how many of the n_items are there. parts, part_sums, found: see Outputs. lasts (blocks):
   their last segments, for append_merge.cu. scale: positive, times log2(e). early: launched as a dependent of one that
   may write q and the newest tokens, but no table, length, slot or item. */
#include "../device/pdl.cuh"
#include "append_pages.cuh"
#include "append_products.cuh"
#include "append_store.cuh"

// A block starts with 168 for each of its threads, and has no more to share out.
constexpr int MULTIPLY_REGISTERS = 208, PAGE_REGISTERS = 3 * 168 - WARPGROUPS * MULTIPLY_REGISTERS;

/* A warpgroup's 64 rows of q to shared memory, as operand. Copies are under way behind it. */
__device__ __forceinline__ void load_queries(Shared &s, const Segment &segment, const T *q, const int *list,
                                             int q_rows, int n_heads, int warpgroup, int thread) {
    constexpr int WORDS = HEAD_DIM / 8;
    const int first = segment.row + (ROWS == 64 ? 0 : warpgroup * WARPGROUP_ROWS), word = thread % WORDS;
    const unsigned to = shared_address(s.q[warpgroup]) + word / 8 * (WARPGROUP_ROWS * 128);
#pragma unroll
    for (int i = 0; i < WARPGROUP_ROWS * WORDS / 128; i++) {
        const int row = (128 * i + thread) / WORDS, pair = first + row;
        const bool there = pair < segment.pairs;
        long long at = 0;
        if (there) {
            int query = segment.query + pair / GROUP;
            if (S::USE == SHARED) query = min(max(__ldg(list + query), 0), q_rows - 1);
            at = ((long long)query * n_heads + segment.kv_head * GROUP + pair % GROUP) * HEAD_DIM + 8 * word;
        }
        copy_async_or_zero(to + row * 128 + (word % 8 ^ row % 8) * 16, q + at, there);
    }
    copy_async_commit();
}

/* Room for what comes next into this slot. */
__device__ __forceinline__ void release(Ring<STAGES> &ring, Phase<STAGES> &phase) {
    if (threadIdx.x % 32 == 0) ring.release(phase);
    phase.advance();
}

/* A warpgroup without rows lets pass what is brought. */
__device__ __forceinline__ void pass_steps(Shared &s, int steps, Phase<STAGES> &k_phase, Phase<STAGES> &v_phase) {
    for (int step = 0; step < steps; step++) {
        s.k_ring.wait_full(k_phase);
        release(s.k_ring, k_phase);
        s.v_ring.wait_full(v_phase);
        release(s.v_ring, v_phase);
    }
}

/* All steps of a segment but the product with the last step's values. */
__device__ __forceinline__ void walk_steps(Shared &s, const Segment &segment, const Limits &limits, Scores &scores,
                                           Weights &weights, Values &o, RowSums &sums, Phase<STAGES> &k_phase,
                                           Phase<STAGES> &v_phase, float to_log2, int warpgroup, int thread) {
    const unsigned q = shared_address(s.q[warpgroup]);
    const unsigned here = limits.first / 8 * EIGHT, k = shared_address(s.k) + here, v = shared_address(s.v) + here;
    const int first = warp_uniform(segment.first_step), steps = warp_uniform(segment.steps);
    s.k_ring.wait_full(k_phase);
    wgmma_fence();
    start_scores(scores, q, k + k_phase.stage * STEP_BYTES);
    wgmma_commit();
    wgmma_wait<0>();
    keep(scores);
    release(s.k_ring, k_phase);
    if (limits.cross(first)) limits.mask(scores, first, thread % 32);
    sums.online_softmax(scores, to_log2);
    to_operand(weights, scores);
    if (steps > 1) s.k_ring.wait_full(k_phase);
#pragma unroll 1
    for (int step = 1; step < steps; step++) {
        wgmma_fence();
        start_scores(scores, q, k + k_phase.stage * STEP_BYTES);
        wgmma_commit();
        s.v_ring.wait_full(v_phase);
        start_values(o, weights, v + v_phase.stage * STEP_BYTES, step > 1);
        wgmma_commit();
        wgmma_wait<1>();
        keep(scores);
        release(s.k_ring, k_phase);
        if (limits.cross(first + step)) limits.mask(scores, first + step, thread % 32);
        const bool rises = sums.online_softmax(scores, to_log2);
        keep(scores);
        keep(sums.weights);
        if (step + 1 < steps) s.k_ring.wait_full(k_phase);
        wgmma_wait<0>();
        keep(o);
        release(s.v_ring, v_phase);
        if (rises) sums.rescale(o);
        to_operand(weights, scores);
    }
}

/* The role of a warpgroup that multiplies. */
__device__ __forceinline__ void multiply(Shared &s, const T *q, const int *list, int q_rows, const Outputs &to,
                                         float to_log2, int warpgroup, int thread) {
    Phase<SEGMENTS> place;
    Phase<STAGES> k_phase, v_phase;
    s.segment_ring.wait_full(place);
    if (s.segments[0].steps) load_queries(s, s.segments[0], q, list, q_rows, to.n_heads, warpgroup, thread);
    while (s.segments[place.stage].steps) {
        const Segment &segment = s.segments[place.stage];
        const bool rows = ROWS == 64 || segment.row + warpgroup * WARPGROUP_ROWS < segment.pairs;
        const Limits limits(segment, warpgroup, thread);
        RowSums sums;
        Scores scores;
        Weights weights;
        Values o;
        copy_async_wait<0>();
        fence_async_proxy();
        named_barrier<128>(OWN + warpgroup); // all queries are there
        Phase<SEGMENTS> next = place;
        next.advance();
        const auto load_next = [&] {
            s.segment_ring.wait_full(next);
            named_barrier<128>(OWN + warpgroup); // all are done with the queries
            if (s.segments[next.stage].steps)
                load_queries(s, s.segments[next.stage], q, list, q_rows, to.n_heads, warpgroup, thread);
        };
        if (rows) {
            walk_steps(s, segment, limits, scores, weights, o, sums, k_phase, v_phase, to_log2, warpgroup, thread);
            s.v_ring.wait_full(v_phase);
            wgmma_fence();
            start_values(o, weights, shared_address(s.v) + limits.first / 8 * EIGHT + v_phase.stage * STEP_BYTES,
                         segment.steps > 1);
            wgmma_commit();
            load_next();
            wgmma_wait<0>();
            keep(o);
            release(s.v_ring, v_phase);
            store(s, o, sums, segment, to, warpgroup, thread);
        } else {
            pass_steps(s, segment.steps, k_phase, v_phase);
            load_next();
        }
        __syncwarp();
        if (thread % 32 == 0) s.segment_ring.release(place);
        place = next;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
append(const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,
       const __grid_constant__ CUtensorMap k8, const __grid_constant__ CUtensorMap v8, const T *q, T *out,
       float *parts, float2 *part_sums, int4 *found, Segment *lasts, const int *table, const int *lens,
       const int *items, const int *count, const int *list, int n_items, int queries, int q_rows, int n_kv_heads,
       int n_pages, int max_pages, int max_requests, int whole, float scale, int early) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int warpgroup = warp_uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    const int rank = blockIdx.x % TEAM;
    let_next_kernel_start();
    if (threadIdx.x == 0) s.init();
    if (threadIdx.x == 128 * WARPGROUPS) prefetch(k), prefetch(v), prefetch(k8), prefetch(v8);
    if (!early) wait_for_previous_kernel();
    __syncthreads();
    if (warpgroup == WARPGROUPS) {
        give_registers<PAGE_REGISTERS>();
        const int there = S::USE == SHARED ? min(__ldg(count), n_items) : n_items;
        const Problem problem{table, lens, items, there, queries, n_kv_heads, n_pages, max_pages, max_requests,
                              whole != 0};
        if (thread < 32) bring_pages(s, problem, {k, k8}, {v, v8}, lasts, rank, thread);
        else wait_for_previous_kernel();
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        wait_for_previous_kernel();
        const Outputs to{out, parts, part_sums, found, n_kv_heads * GROUP, (int)gridDim.x};
        multiply(s, q, list, q_rows, to, scale, warpgroup, thread);
    }
    __syncwarp(); // lanes end together: without it, ptxas keeps more, and spills with teams
}
