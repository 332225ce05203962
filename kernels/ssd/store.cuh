/* The role of one thread: y, as the multiplying warpgroups leave it in the place of x, off to memory by TMA. */
#pragma once
#include "../device/hopper/tma.cuh"
#include "shared.cuh"

/* Where the row's tile of a chunk lies in x, y and z: see fused.cu. */
__device__ __forceinline__ Place place_of_row(const Step &step, int side, int chunk) {
    if constexpr (S::PADDED_HEAD)
        return {{step.head_part(side) * WIDTH, chunk * CHUNK, step.head(side), step.batch, 0}};
    return {{0, chunk * CHUNK, step.head_part(side), step.head(side), step.batch}};
}

__device__ __forceinline__ void store_tiles(Shared &s, const CUtensorMap &y) {
    Phase<STAGES> phase;
    unsigned y_parities = 0; // a bit for each stage: only pass 2 has a y
    for (;; phase.advance()) {
        const int stage = phase.stage;
        s.ring.wait_full(phase);
        const Step &step = s.steps[stage];
        if (step.kind & END) break;
        if (step.kind & FLUSH) {
            store_wait();
            __threadfence();
        }
        if (!(step.kind & LOCAL)) {
            s.y_full[stage].wait(y_parities >> stage & 1);
            y_parities ^= 1 << stage;
            for (int side = 0; side < ROWS; side++)
                if (step.has_row(side))
                    store_tile(y, place_of_row(step, side, step.chunk), s.x[stage][side], LEAVES_FIRST);
            store_commit();
            store_wait_read();
        }
        s.ring.release(phase);
    }
    store_wait();
}
