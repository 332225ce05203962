/* Work as a line of numbered tasks, which blocks take by tickets: fast multiprocessors take more, and nobody has a share
   to finish while others have none left. A task may wait for those in front of it: each was taken by a block that runs.

   One warp of a block takes tickets, and puts what their tasks need into the slots of a ring; other warps read them. */
#pragma once
#include "mbarrier.cuh"

/* What a block has taken: tasks, and with each a slot of shared memory for what it reads. */
template <class Task, int SLOTS> struct TakenTasks {
    Ring<SLOTS> ring;
    Task tasks[SLOTS];
};

/* The next ticket, in lane 0 of a warp that calls, which is not waited for until it is needed. next: in global memory, 0
   before the first is taken. (Of an addition ptxas makes one for all lanes that come together, and has them wait at
   once: more than half a microsecond for each task. Counting up to a bound it leaves alone.) */
__device__ __forceinline__ unsigned take_ticket(unsigned *next, int lane) {
    unsigned number = 0;
    if (lane == 0)
        asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], 0x80000000;" : "=r"(number) : "l"(next) : "memory");
    return number;
}

/* loader.put(number), number in lane 0, of one ticket after another, until it says that this was the last. */
template <class Loader> __device__ __forceinline__ void put_by_tickets(Loader &loader) {
    unsigned first = loader.take(), second = loader.take(); // two, so that one is there when it is wanted
    for (;;) {
        if (!loader.put(first)) return;
        first = loader.take();
        if (!loader.put(second)) return;
        second = loader.take();
    }
}

/* A warp needs its slot no more: one arrival of those that the ring's readers were announced as. */
template <int STAGES>
__device__ __forceinline__ void release_by_warp(Ring<STAGES> &ring, Phase<STAGES> &phase, int thread) {
    __syncwarp();
    if (thread % 32 == 0) ring.release(phase);
    phase.advance();
}
