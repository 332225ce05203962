/* mbarriers: barriers in shared memory at which threads arrive without waiting, and copies of whole tiles arrive too.
   Since compute capability 9.0 (in a plainer form 8.0).

   A barrier is in a phase, numbered from 0. The phase ends when as many arrivals have come as init() said, and all
   bytes that were announced; then the next begins by itself. wait(parity) is over once a phase of that parity has
   ended: who waits for phase 0, 1, 2, ... asks for parity 0, 1, 0, ... A fresh barrier lets pass who asks for parity
   1, as if a phase -1 had ended: so a slot that is empty from the start needs no arrival.

   Without a wait a thread reads what has not come, or writes over what is still read. With the wrong parity it passes a
   phase too early, or waits for ever. With fewer bytes announced than come the phase ends before the last of them. */
#pragma once
#include "../copy.cuh"

struct Barrier {
    unsigned long long state; // the hardware's

    __device__ __forceinline__ unsigned at() const { return shared_address(&state); }

    /* By one thread, before all others use it: init, init_done(), and a barrier of the block. */
    __device__ __forceinline__ void init(unsigned arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at()), "r"(arrivals) : "memory");
    }
    /* What was initialised is so for copies, too, and for other blocks of the cluster. */
    static __device__ __forceinline__ void init_done() {
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at()) : "memory");
    }
    /* Arrive, and announce bytes that copies will bring. */
    __device__ __forceinline__ void expect(unsigned bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes) : "memory");
    }
    /* Arrive once all copies that this thread has started with cp.async have come. The thread itself goes on. */
    __device__ __forceinline__ void arrive_with_copies() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at()) : "memory");
    }
    __device__ __forceinline__ void wait(unsigned parity) const {
        asm volatile("{ .reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1; "
                     "@!over bra again; }" ::"r"(at()), "r"(parity) : "memory");
    }
};

/* Where somebody is in a ring: the slot, and the parity of the round. */
template <int STAGES> struct Phase {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

/* A ring of slots between those who fill them and those who read. Each side has a Phase of its own, and advances it.

       filler:  ring.wait_empty(phase);  fill slot phase.stage, arriving at ring.full[phase.stage];  phase.advance();
       reader:  ring.wait_full(phase);   read slot phase.stage;  ring.release(phase);                phase.advance(); */
template <int STAGES> struct Ring {
    Barrier full[STAGES], empty[STAGES];

    __device__ __forceinline__ void init(unsigned fillers, unsigned readers) {
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) full[stage].init(fillers), empty[stage].init(readers);
        Barrier::init_done();
    }
    __device__ __forceinline__ void wait_empty(Phase<STAGES> phase) const {
        empty[phase.stage].wait(phase.parity ^ 1); // the readers' phase of the round before
    }
    __device__ __forceinline__ void wait_full(Phase<STAGES> phase) const { full[phase.stage].wait(phase.parity); }
    /* This reader is done. TMA may see the arrival before a load ahead of it is answered: on an H200 a kernel that read
       a tile by ldmatrix, released it at once and used the values later got numbers of the tile that came next, where
       another warp's long run of stores kept loads waiting. So use the values first, or make a fence_async_proxy()
       (tma.cuh); then arrive. Where threads fill the slots, the arrival alone is enough. */
    __device__ __forceinline__ void release(Phase<STAGES> phase) { empty[phase.stage].arrive(); }
};
