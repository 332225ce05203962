/* The role of a warp in chunks.cu: from sums over a chunk to the gradients of its steps. Lane l has tokens 2 l and
   2 l + 1.

   A step's logarithm a_t = A dt_t is in the decay of every pair (i, j) with j < t <= i. The sum of M_ij over those is
   the sum over i >= t of (row i of M less column i of M): pairs with both in it drop out. To that come what outputs
   i >= t take of the state before the chunk, what inputs j < t give to the state behind it, and what passes through all
   of it. Sums begin anew at each chunk: over a long sequence they would lose their digits. */
#pragma once
#include "../device/reduce.cuh"
#include "shared.cuh"

struct StepGradients {
    float2 dt;               // of the lane's two tokens
    float slope, skip, bias; // the chunk's part of dA, of dD and of that of dt_bias
};

__device__ __forceinline__ float2 pair_of(const float *of_tokens, int lane) {
    return *(const float2 *)(of_tokens + 2 * lane);
}

/* a: A of the head. slopes: d step / d dt, where 0 says that a limit holds the step. */
__device__ __forceinline__ StepGradients step_gradients(const StepSums &sums, float a, float2 slopes, int lane) {
    float2 take = pair_of(sums.from_start, lane); // token i: what it takes of what was before it, less what it gives
    const float2 give = pair_of(sums.over_outputs, lane);
    take.x -= give.x, take.y -= give.y;
#pragma unroll
    for (int warp = 0; warp < 4; warp++) {
        const float2 part = pair_of(sums.over_inputs[warp], lane);
        take.x += part.x, take.y += part.y;
    }
    const float2 end = pair_of(sums.to_end, lane);
    float behind = take.x + take.y, before = end.x + end.y; // of the lane; then from it on, and up to it
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float later = __shfl_down_sync(~0u, behind, distance), earlier = __shfl_up_sync(~0u, before, distance);
        if (lane + distance < 32) behind += later;
        if (lane >= distance) before += earlier;
    }
    before -= end.x + end.y;
    const float through = sums.state[0] + sums.state[1] + sums.state[2] + sums.state[3];
    const float2 da = {behind + before + through, behind - take.x + before + end.x + through};
    const float2 dt = pair_of(sums.dt, lane), direct = pair_of(sums.direct, lane);
    const float2 ddt = {slopes.x * (a * da.x + direct.x), slopes.y * (a * da.y + direct.y)};
    return {ddt, warp_sum(da.x * dt.x + da.y * dt.y), sums.skip[0] + sums.skip[1] + sums.skip[2] + sums.skip[3],
            warp_sum(ddt.x + ddt.y)};
}

/* Of each head: ddt, a line of 64 tokens, and the chunk's part of dA and dD. */
__device__ __forceinline__ void make_steps(Shared &s, const Sizes &sizes, const float *a, const float *slopes,
                                           float *dt_gradients, float4 *head_sums, int batch, int chunk,
                                           const Run &run, int lane) {
    Phase<2> place;
    for (int row = run.first; row < run.last; row++, place.advance()) {
        const int head = sizes.head_of(row);
        const float slope = a[head];
        const float2 rule = pair_of(slopes + sizes.line_of(batch, head, chunk) * CHUNK, lane);
        s.sums_ring.wait_full(place);
        const StepGradients found = step_gradients(s.sums[place.stage], slope, rule, lane);
        const long long line = sizes.row_line_of(batch, row, chunk);
        *(float2 *)(dt_gradients + line * CHUNK + 2 * lane) = found.dt;
        if (lane == 0) head_sums[line] = make_float4(found.slope, found.skip, found.bias, 0);
        __syncwarp();
        if (lane == 0) s.sums_ring.release(place);
    }
}
