/* For long messages: each device sums one share of the words, and hands the sum to all.

   x (n,): this device's message, and the sum; xs: those of all, which are read and written where they lie.

   New since pulling: with d devices, 2 / d of the bytes. Each device reads (d - 1) / d of a message and writes as much,
   where a device that sums everything reads d - 1 messages. For two devices the bytes are the same, half of them in
   each direction at a time, and no copy is made: a word is read and written by one thread, whatever device it lies on.

   Moves: 2 * (devices - 1) / devices * n numbers over the link from each device. In a row: barrier, load, store,
   barrier. */
#include "barrier.cuh"

constexpr int IN_FLIGHT = DEVICES == 2 ? 4 : DEVICES <= 4 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(512)
two_shot(T *x, const __grid_constant__ Peers xs, unsigned *flags, const __grid_constant__ Peers all_flags,
         uint2 *numbers, Told told, int rank, int limit, long long n, int wide) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Exchange now = next_exchange(numbers);
    if (now.failed) return;
    const long long words = (Message{x, n, wide}).words(), share = (words + DEVICES - 1) / DEVICES;
    const long long begin = min(rank * share, words), end = min(begin + share, words);
    const Part part = part_of(end - begin);
    bool come = barrier<0>(all_flags, flags, now.number, rank, limit, told);
    for (long long k = begin + part.first + threadIdx.x; come && k < begin + part.last; k += IN_FLIGHT * blockDim.x) {
        uint4 of[IN_FLIGHT][DEVICES];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
#pragma unroll
            for (int r = 0; r < DEVICES; r++)
                if (k + u * blockDim.x < begin + part.last)
                    of[u][r] = Message{(T *)xs.of[r], n, wide}.load(k + u * blockDim.x);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            if (k + u * blockDim.x >= begin + part.last) continue;
            const uint4 sum = sum_of(of[u]);
#pragma unroll
            for (int r = 0; r < DEVICES; r++) Message{(T *)xs.of[r], n, wide}.store(k + u * blockDim.x, sum);
        }
    }
    if (come) come = barrier<1>(all_flags, flags, now.number, rank, limit, told);
    end_exchange(numbers, now.number, !come);
}
