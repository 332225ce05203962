/* Adds up what planned.cu leaves of tiles that were cut along k: y = the sum of splits (m, n) matrices of float32, in
   the order of k, so that the same call gives the same bits. Launched as a dependent, it starts while the kernel ahead
   still runs, and waits. Moves 4 * splits + 2 bytes for each number of y. Launch ceil(count / 1024) blocks of 256. */
#include "../device/pdl.cuh"
#include "dtype.cuh"
constexpr int THREADS = 256, NUMBERS = 4;

extern "C" __global__ void __launch_bounds__(THREADS)
merge(const float *parts, T *y, long long count, int splits) {
    const long long first = (long long)blockIdx.x * THREADS * NUMBERS + threadIdx.x;
    float sums[NUMBERS] = {};
    wait_for_previous_kernel();
    for (int part = 0; part < splits; part++)
#pragma unroll
        for (int i = 0; i < NUMBERS; i++)
            if (first + i * THREADS < count) sums[i] += parts[part * count + first + i * THREADS];
#pragma unroll
    for (int i = 0; i < NUMBERS; i++)
        if (first + i * THREADS < count) y[first + i * THREADS] = (T)sums[i];
}
