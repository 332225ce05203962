/* How rungs 4 to 7 fill a stage: one thread asks TMA for two boxes. */
#pragma once
#include "../device/hopper/tma.cuh"
#include "tiles.cuh"

/* One thread: rows of x from `row` on, rows of W from `column` on, of one step along k, once their stage is empty. */
template <class Stage, int STAGES>
__device__ __forceinline__ void load_step(Ring<STAGES> &ring, Phase<STAGES> &filling, Stage *stages,
                                          const CUtensorMap &x, const CUtensorMap &W, int row, int column, int step) {
    Stage &stage = stages[filling.stage];
    Barrier &full = ring.full[filling.stage];
    ring.wait_empty(filling);
    full.expect(sizeof(Stage));
    load_tile(stage.x, x, row, step * STEP, full);
    load_tile(stage.w, W, column, step * STEP, full);
    filling.advance();
}
