/* Rung 2: each device reads the others' messages where they lie, between two barriers.

   x (n,): this device's message, and the sum. buffer (words,): a copy that peers may read, buffers: those of all.

   The first barrier says that the buffers are full. The second that they have been read: without it, a device that is
   ahead fills its buffer with the next message while a peer still reads this one.

   New since the copies: one launch, and no copy engine. A load over the link takes 0.8 µs, and four are on their way
   for each thread.

   Moves: (devices - 1) * n numbers over the link to each device; flags of 4 bytes. In a row: barrier, load, barrier. */
#include "barrier.cuh"

constexpr int IN_FLIGHT = DEVICES == 2 ? 4 : DEVICES <= 4 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(512)
pull(T *x, uint4 *buffer, const __grid_constant__ Peers buffers, unsigned *flags,
     const __grid_constant__ Peers all_flags, uint2 *numbers, Told told, int rank, int limit, long long n, int wide) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Exchange now = next_exchange(numbers);
    if (now.failed) return;
    const Message message = {x, n, wide};
    const Part part = part_of(message.words());
    for (long long k = part.first + threadIdx.x; k < part.last; k += blockDim.x) buffer[k] = message.load(k);
    bool come = barrier<0>(all_flags, flags, now.number, rank, limit, told);
    for (long long k = part.first + threadIdx.x; come && k < part.last; k += IN_FLIGHT * blockDim.x) {
        uint4 words[IN_FLIGHT][DEVICES];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
#pragma unroll
            for (int r = 0; r < DEVICES; r++)
                if (k + u * blockDim.x < part.last)
                    words[u][r] = __ldcg((const uint4 *)buffers.of[r] + k + u * blockDim.x);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (k + u * blockDim.x < part.last) message.store(k + u * blockDim.x, sum_of(words[u]));
    }
    if (come) come = barrier<1>(all_flags, flags, now.number, rank, limit, told);
    end_exchange(numbers, now.number, !come);
}
