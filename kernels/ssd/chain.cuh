/* The chain between blocks: what pass 1 of a share leaves for the shares behind it, and in which order.

   Tickets come from an atomic counter, so a block waits for tickets that are taken, by blocks that run. Pass 1 waits
   for nobody; pass 2 of a ticket waits for pass 1 of tickets before it. So there is always a block that can go on.

   A state goes over in four steps: 128 threads store it; they meet at a barrier; one of them releases the flag. On the
   other side one thread acquires it; 128 threads meet; they load. A release publishes what its thread has seen, and by
   the barrier it has seen all of it.

   Epochs. Nothing is reset between launches. A launch takes tickets + gridDim.x of the counter (each block ends with a
   ticket that is none), so the quotient is the number of the launch, and a flag is raised when it holds that number.
   Two launches that may run at once, or that take another number of tickets or blocks, need counters of their own. */
#pragma once
#include "../device/grid.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "shares.cuh"
#include "state.cuh"

using Count = unsigned long long;

/* What blocks leave for each other. */
struct Chain {
    float *states;   // (tickets, 2, STATE_NUMBERS): end states of pass 1
    float *logs;     // (tickets, 2): log2 of the decay over what pass 1 walked
    Count *counters; // tickets taken, and tickets done
    unsigned *flags; // (tickets, 2); they lie behind the two counters
    unsigned *marks; // (pairs,): of those to walk anew

    __device__ __forceinline__ Chain(const Sizes &sizes, float *memory, Count *counters)
        : states(memory), logs(states + 2ll * sizes.tickets * STATE_NUMBERS), counters(counters),
          flags(reinterpret_cast<unsigned *>(counters + 2)), marks(flags + 2ll * sizes.tickets) {}

    /* By the first lane of a warp, alone. The compiler does not know that. If all lanes would add the same, it lets one
       add for all and shuffles what it finds; and a shuffle waits. So each lane would add another number. */
    __device__ __forceinline__ Count take_ticket() const {
        unsigned lane;
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        return atomicAdd(counters, 1ull + lane);
    }
    /* Tickets are done: all that was written before is there for who sees it. */
    __device__ __forceinline__ void tell_done(int tickets) const {
        __threadfence();
        atomicAdd(counters + 1, (Count)tickets);
    }
    /* Until all tickets of all launches up to this one are done. */
    __device__ __forceinline__ void wait_for_all(Count tickets) const {
        while (load_acquire(counters + 1) < tickets) continue;
    }

    /* By a whole warp at once, and without a branch for one lane: see warp_uniform. */
    __device__ __forceinline__ void mark(int pair, unsigned launch) const { store_relaxed(marks + pair, launch); }
    /* Whether the pair is marked, and this block the first to see it. */
    __device__ __forceinline__ bool take_mark(int pair, unsigned launch) const {
        return load_acquire(marks + pair) == launch && atomicCAS(marks + pair, launch, 0) == launch;
    }
};

/* By a warpgroup, whose own barrier is 1 + side. */
__device__ __forceinline__ void wait_for(const unsigned *flag, unsigned value, int side, int thread) {
    if (thread == 0)
        while (load_acquire(flag) != value) continue;
    named_barrier<128>(1 + side);
}
/* All threads' stores come before the flag: they are in order before this thread by the barrier, and what it knows is
   published by the release. A fence in front of it would do nothing more, and everyone would wait for it: the next
   product needs all warps. */
__device__ __forceinline__ void publish(unsigned *flag, unsigned value, int side, int thread) {
    named_barrier<128>(1 + side);
    if (thread == 0) store_release(flag, value);
}

/* What pass 1 of this share has found, for the shares behind it. */
__device__ __forceinline__ void hand_on(const float (&state)[THREAD_NUMBERS], float log_piece, const Chain &chain,
                                        int ticket, unsigned launch, int side, int thread) {
    const int number = 2 * ticket + side;
    write_state(chain.states + (long long)number * STATE_NUMBERS, state, thread);
    if (thread == 0) chain.logs[number] = log_piece;
    publish(chain.flags + number, launch, side, thread);
}

/* Step 4: the state before the first chunk of a piece, from pass 1 of the pieces before it, the newest first. Always in
   this order: the same bits in every run. */
__device__ __forceinline__ void look_back(float (&state)[THREAD_NUMBERS], const Shared &s, const Step &step,
                                          const Sizes &sizes, const Chain &chain, const Initial *initial, int side,
                                          int thread) {
    clear(state);
    if (!step.has_row(side)) return;
    float log = 0;
    const unsigned launch = s.launch;
    for (int ticket = step.ticket, spot = step.chunk; spot > 0;) {
        ticket -= sizes.together();
        const int begin = cut(s, sizes, ticket, step.pair);
        if (begin == spot) continue; // nothing of this pair
        const int number = 2 * ticket + side;
        wait_for(chain.flags + number, launch, side, thread);
        add_state(state, chain.states + (long long)number * STATE_NUMBERS, exp2_approx(log), thread);
        log += __ldcg(chain.logs + number);
        if (log < sizes.log2_negligible) return;
        spot = begin;
    }
    if (initial)
        add_matrix(state, initial + step.column(side, sizes.heads) * S::DSTATE, exp2_approx(log), step.columns(side),
                   side, thread);
}
