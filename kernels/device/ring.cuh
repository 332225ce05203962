/* A ring of STAGES slots in shared memory, filled by cp.async and read by the same threads that filled it: so it needs
   no barrier. (A ring whose slots other threads read needs one behind wait_full, and one in front of each refill.)

       CopyRing<3> ring;
       for (int stage = 0; stage < 3; stage++) { copy into slot `stage`; ring.filled(); }
       while (more) {
           int slot = ring.wait_full();    // the oldest slot has arrived
           take what is in it;
           copy into it again;  ring.filled();
           ring.advance();
       }

   Every turn fills a slot, be it with nothing: wait_full counts fillings. Without the empty ones at the end it would
   count those that are still on their way as arrived. With PARTS = 2 a slot has two fillings, say keys and values,
   that are waited for one after the other. */
#pragma once
#include "copy.cuh"

template <int STAGES, int PARTS = 1> struct CopyRing {
    int slot = 0; // the oldest

    /* What was copied since the last call fills a slot, or a part of it. */
    static __device__ __forceinline__ void filled() { copy_async_commit(); }

    /* Until the oldest slot's part has arrived; the slot's number. */
    template <int PART = 0> __device__ __forceinline__ int wait_full() const {
        copy_async_wait<STAGES * PARTS - 1 - PART>();
        return slot;
    }
    __device__ __forceinline__ void advance() { slot = slot + 1 < STAGES ? slot + 1 : 0; }
};
