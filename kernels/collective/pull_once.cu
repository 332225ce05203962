/* Rung 3: the same with one barrier, and two buffers by turns.

   x (n,): this device's message, and the sum. buffer (2, room): copies that peers may read, of this exchange and of the
   last one; buffers: those of all.

   New since two barriers: the second one is gone, 2 µs with it. A device fills a buffer again two exchanges later.
   By then it has passed the barrier of the exchange between, which a peer comes to only when its own launch of this one
   has ended: it has read what it needs.

   Moves: (devices - 1) * n numbers over the link to each device; flags of 4 bytes. In a row: barrier, load. */
#include "barrier.cuh"

constexpr int IN_FLIGHT = DEVICES == 2 ? 4 : DEVICES <= 4 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(512)
pull_once(T *x, uint4 *buffer, const __grid_constant__ Peers buffers, unsigned *flags,
          const __grid_constant__ Peers all_flags, uint2 *numbers, Told told, int rank, int limit, long long n,
          int wide, long long room) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Exchange now = next_exchange(numbers);
    if (now.failed) return;
    const Message message = {x, n, wide};
    const Part part = part_of(message.words());
    const long long turn = now.number % 2 * room;
    for (long long k = part.first + threadIdx.x; k < part.last; k += blockDim.x) buffer[turn + k] = message.load(k);
    const bool come = barrier<0>(all_flags, flags, now.number, rank, limit, told);
    for (long long k = part.first + threadIdx.x; come && k < part.last; k += IN_FLIGHT * blockDim.x) {
        uint4 words[IN_FLIGHT][DEVICES];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
#pragma unroll
            for (int r = 0; r < DEVICES; r++)
                if (k + u * blockDim.x < part.last)
                    words[u][r] = __ldcg((const uint4 *)buffers.of[r] + turn + k + u * blockDim.x);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (k + u * blockDim.x < part.last) message.store(k + u * blockDim.x, sum_of(words[u]));
    }
    end_exchange(numbers, now.number, !come);
}
