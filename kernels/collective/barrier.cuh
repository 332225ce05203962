/* A barrier of one block with the blocks of its number on all other devices.

   Thread r tells device r, and waits for it. What the block did before, its own barrier brings to thread r, and r's
   release to the peer; the peer's acquire and barrier bring it to all threads there. 1.35 µs over NVLink, against 0.75
   for a word that carries its flag. */
#pragma once
#include "exchange.cuh"

constexpr int FLAG = 8; // numbers of 4 bytes from one flag to the next: 32 bytes

/* of: flags [site][rank of who sets it][block] on each device; own: on this one. False where a peer has not come. */
template <int SITE>
__device__ __forceinline__ bool barrier(const Peers &of, const unsigned *own, unsigned number, int rank, int limit,
                                        Told told) {
    bool come = true;
    const int r = threadIdx.x;
    __syncthreads();
    if (r < DEVICES && r != rank) {
        unsigned *theirs = (unsigned *)of.of[r] + ((SITE * DEVICES + rank) * gridDim.x + blockIdx.x) * FLAG;
        const unsigned *mine = own + ((SITE * DEVICES + r) * gridDim.x + blockIdx.x) * FLAG;
        store_release_system(theirs, number);
        come = wait_for([&] { return (int)(load_acquire_system(mine) - number) >= 0; }, r, limit, told);
    }
    return !__syncthreads_or(!come);
}
