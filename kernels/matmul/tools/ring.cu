/* A ring of mbarriers, alone: warp 0 hands rows of 32 numbers to warp 1, which turns them around, through three slots.
   Neither meets the other at a barrier. Warp 0 is up to three rows ahead. Launch one block of 64 threads. */
#include "../../device/hopper/mbarrier.cuh"
constexpr int STAGES = 3;

extern "C" __global__ void ring(const int *from, int *to, int rows) {
    __shared__ int slots[STAGES][32];
    __shared__ Ring<STAGES> ring;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) ring.init(32, 32); // lanes of warp 0 fill a slot, lanes of warp 1 read it
    __syncthreads();
    Phase<STAGES> phase;
    for (int row = 0; row < rows; row++) {
        if (threadIdx.x < 32) {
            ring.wait_empty(phase);
            slots[phase.stage][lane] = from[32 * row + lane];
            ring.full[phase.stage].arrive();
        } else {
            ring.wait_full(phase);
            to[32 * row + lane] = slots[phase.stage][31 - lane];
            ring.release(phase);
        }
        phase.advance();
    }
}
