/* The link by hand: what one load, one flag and many words take, over it and beside it.

   chase, store_and_fence: one thread. flag_*, data_and_flag: one thread on each of two devices, who hand a number to and
   fro. load_words, store_words: as many blocks as are wanted. On cards link.py times them; on the SIMT machine it counts.

   Peers are memory of all devices; `device` says whose is meant. out: a number for the host, so that no load is in
   vain. */
#include "../device/peers.cuh"

constexpr int IN_FLIGHT = 4; // words that a thread of load_words has on their way

__device__ __forceinline__ unsigned load_relaxed_system(const unsigned *at) {
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_relaxed_system(unsigned *at, unsigned value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

/* One load after another: each says where the next one is. */
extern "C" __global__ void chase(unsigned *out, const __grid_constant__ Peers chains, int device, int steps) {
    const unsigned *chain = (const unsigned *)chains.of[device];
    unsigned at = 0;
    for (int i = 0; i < steps; i++) at = load_relaxed_system(chain + at);
    *out = at;
}

/* A store, and a wait until it has come: .sys for all devices, .gpu for this one. */
extern "C" __global__ void store_and_fence(unsigned *out, const __grid_constant__ Peers words, int device, int steps,
                                           int system) {
    unsigned *at = (unsigned *)words.of[device];
    for (int i = 0; i < steps; i++) {
        store_relaxed_system(at, i);
        if (system)
            __threadfence_system();
        else
            __threadfence();
    }
    *out = steps;
}

/* Ways to tell a peer a number n, and to see that it has come. A mailbox has two words of 16 bytes: data, and a flag. */
struct Relaxed {
    static __device__ void tell(uint4 *to, unsigned n) { store_relaxed_system((unsigned *)(to + 1), n); }
    static __device__ bool come(const uint4 *at, unsigned n) {
        return load_relaxed_system((const unsigned *)(at + 1)) == n;
    }
};
struct Word { // data and number in one store
    static __device__ void tell(uint4 *to, unsigned n) { send(to, make_uint4(n, 2 * n, 3 * n, n)); }
    static __device__ bool come(const uint4 *at, unsigned n) {
        const uint4 v = look(at);
        return v.x == n && v.w == n;
    }
};
struct Released {
    static __device__ void tell(uint4 *to, unsigned n) { store_release_system((unsigned *)(to + 1), n); }
    static __device__ bool come(const uint4 *at, unsigned n) {
        return load_acquire_system((const unsigned *)(at + 1)) == n;
    }
};
struct DataAndFlag { // data, and behind them a flag
    static __device__ void tell(uint4 *to, unsigned n) {
        *to = make_uint4(n, 2 * n, 3 * n, n);
        store_release_system((unsigned *)(to + 1), n);
    }
    static __device__ bool come(const uint4 *at, unsigned n) { return Released::come(at, n) && at->z == 3 * n; }
};
/* Device 0 tells, device 1 answers, so many times. out: how many numbers have come. */
template <class Way>
__device__ __forceinline__ void to_and_fro(unsigned *out, const Peers &mails, int rank, unsigned first, int rounds,
                                           int limit, Told told) {
    uint4 *theirs = (uint4 *)mails.of[1 - rank];
    const uint4 *mine = (const uint4 *)mails.of[rank];
    bool come = true;
    unsigned n = first;
    for (; come && n < first + rounds; n++) {
        if (rank == 0) Way::tell(theirs, n);
        come = wait_for([&] { return Way::come(mine, n); }, 1 - rank, limit, told);
        if (rank == 1 && come) Way::tell(theirs, n);
    }
    *out = n - first - !come;
}
extern "C" __global__ void flag_relaxed(unsigned *out, const __grid_constant__ Peers mails, int rank, unsigned first,
                                        int rounds, int limit, Told told) {
    to_and_fro<Relaxed>(out, mails, rank, first, rounds, limit, told);
}
extern "C" __global__ void flag_word(unsigned *out, const __grid_constant__ Peers mails, int rank, unsigned first,
                                     int rounds, int limit, Told told) {
    to_and_fro<Word>(out, mails, rank, first, rounds, limit, told);
}
extern "C" __global__ void flag_released(unsigned *out, const __grid_constant__ Peers mails, int rank, unsigned first,
                                         int rounds, int limit, Told told) {
    to_and_fro<Released>(out, mails, rank, first, rounds, limit, told);
}
extern "C" __global__ void data_and_flag(unsigned *out, const __grid_constant__ Peers mails, int rank, unsigned first,
                                         int rounds, int limit, Told told) {
    to_and_fro<DataAndFlag>(out, mails, rank, first, rounds, limit, told);
}

/* All words of a device's memory, IN_FLIGHT at a time by each thread. out: their bits, added without carry. */
extern "C" __global__ void __launch_bounds__(512)
load_words(unsigned *out, const __grid_constant__ Peers words, int device, long long count) {
    const uint4 *from = (const uint4 *)words.of[device];
    const long long step = (long long)gridDim.x * blockDim.x;
    unsigned bits = 0;
    for (long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x; k < count; k += IN_FLIGHT * step) {
        uint4 v[IN_FLIGHT] = {};
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (k + u * step < count) v[u] = __ldcg(from + k + u * step);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) bits ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    atomicXor(out, bits);
}
/* Word k of a device's memory becomes {k, seed, seed, seed}. */
extern "C" __global__ void __launch_bounds__(512)
store_words(unsigned *out, const __grid_constant__ Peers words, int device, long long count, unsigned seed) {
    uint4 *to = (uint4 *)words.of[device];
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x; k < count; k += step)
        to[k] = make_uint4((unsigned)k, seed, seed, seed);
    if (blockIdx.x == 0 && threadIdx.x == 0) *out = seed;
}
