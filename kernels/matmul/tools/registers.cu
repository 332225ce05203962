/* setmaxnreg, alone: of three warpgroups one needs few registers, and two have 200 sums a thread. All start with 168,
   as 384 threads find room for. MOVES 0: they stay so, and sums go to memory and back (the compiler counts these
   spills). to (2, 128, 200): y[i] is the sum of x[row] * x[row + i]. Launch one block of 384 threads. */
#include "../../device/hopper/warpgroup.cuh"
#ifndef MOVES
#define MOVES 1
#endif
constexpr int SUMS = 200;

extern "C" __global__ void __launch_bounds__(384, 1) registers(const float *x, float *to, int rows) {
    const int group = warp_uniform(threadIdx.x / 128);
    if (group == 2) {
        if constexpr (MOVES) give_registers<40>(); // 40 + 232 + 232 is 3 * 168
    } else {
        if constexpr (MOVES) take_registers<232>();
        float sums[SUMS] = {};
        for (int row = threadIdx.x % 128; row < rows; row += 128)
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] += x[row] * x[row + i];
#pragma unroll
        for (int i = 0; i < SUMS; i++) to[(group * 128 + threadIdx.x % 128) * SUMS + i] = sums[i];
    }
}
