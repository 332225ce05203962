/* The warp of a block that takes tickets, and has rows and states copied into slots, long before they are needed. */
#pragma once
#include "../device/hopper/tma.cuh"
#include "token_line.cuh"

/* Where layers' matrices are: those of the first 64 in the registers of a warp, two layers a lane. A read of memory at
   the turn of every layer would hold up all copies. */
struct Matrices {
    static constexpr int HELD = 32;
    long long in[2], out[2];

    __device__ __forceinline__ Matrices(const Model &model, int n_layers, int lane) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int layer = least(HELD * i + lane, n_layers - 1);
            in[i] = model.place(layer, W_IN), out[i] = model.place(layer, W_OUT);
        }
    }
    /* By all lanes, each for a layer of its own. */
    static __device__ __forceinline__ long long of(int layer, const long long (&places)[2]) {
        const long long low = __shfl_sync(~0u, places[0], layer % HELD),
                        high = __shfl_sync(~0u, places[1], layer % HELD);
        return layer < HELD ? low : high;
    }
};

/* What a task reads: a group of rows, which lie one behind another, and as many more, of channels that have states, or
   null. */
struct Source {
    const T *rows, *more;
    int bytes; // of each
};

/* The warp that takes tickets and copies. All its lanes call.

   It has 0.6 µs for a task of 20 KB, or memory rests: a thousand cycles for some two hundred instructions, most of
   which wait for the one before. So a ticket may stand for TICKET tasks, and as many lanes at once reckon what they
   read. */
struct Loader {
    unsigned *ticket;
    int lane;
    unsigned slots; // where they are in shared memory
    Taken &taken;
    Announced &announced;
    Model model;
    Line line;
    Phase<S::SLOTS> phase, oldest; // of those that are on their way
    Phase<FINISHERS> next; // who finishes
    int asked = 0, come = 0;
    const Matrices matrices = {model, line.n_layers, lane};
    int layer = -1; // of the lane's task, and its matrices
    long long in, out;

    __device__ __forceinline__ unsigned take() const { return take_ticket(ticket, lane); }
    /* The tasks of a ticket, lane i the i-th, and what they read, into slots. */
    __device__ __forceinline__ bool put(unsigned number) {
        const Task task = line.task(__shfl_sync(~0u, number, 0) * TICKET + least(lane, TICKET - 1));
        const Source needs = source(task); // looked up here, in front of the waits
        const unsigned ends = __ballot_sync(~0u, task.kind == END);
        const int count = ends ? __ffs(ends) : TICKET; // with the line's end, but nothing behind it
        if (lane < count) announce(task, later(next, lane));
        next = later(next, count);
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < count; i++, phase.advance()) {
            wait_for_room();
            if (lane == i) copy(task, needs);
            __syncwarp();
        }
        if (!ends) return true;
        if (lane < FINISHERS - 1) announce({END}, later(next, lane)); // each is told
        return false;
    }
    static __device__ __forceinline__ Phase<FINISHERS> later(Phase<FINISHERS> from, int by) {
        from.stage += by;
        if (from.stage >= FINISHERS) from.stage -= FINISHERS, from.parity ^= 1;
        return from;
    }
    /* By the task's lane. */
    __device__ __forceinline__ void announce(Task task, Phase<FINISHERS> to) {
        announced.ring.wait_empty(to);
        announced.tasks[to.stage] = task;
        announced.ring.full[to.stage].arrive();
    }
    /* Until another slot may be on its way, and is free. */
    __device__ __forceinline__ void wait_for_room() {
        const int flying = __any_sync(~0u, announced.hear()) ? WHILE_WAITING : AT_A_TIME; // for all lanes
#pragma unroll 1
        for (; asked - come >= flying; come++, oldest.advance()) taken.ring.wait_full(oldest);
        asked++;
        taken.ring.wait_empty(phase);
    }
    /* By the task's lane. */
    __device__ __forceinline__ void copy(Task task, const Source &needs) {
        Barrier &full = taken.ring.full[phase.stage];
        taken.tasks[phase.stage] = task;
        if (!needs.bytes) return full.arrive();
        const unsigned to = slots + phase.stage * SLOT;
        full.expect(needs.more ? 2 * needs.bytes + STATES : needs.bytes);
        copy_bulk(to, needs.rows, needs.bytes, full);
        if (!needs.more) return;
        copy_bulk(to + needs.bytes, needs.more, needs.bytes, full);
        copy_bulk(to + STATES_AT, model.state(task.layer, 2 * task.number), STATES, full);
    }

    __device__ __forceinline__ void look_up(int of) {
        layer = of, in = Matrices::of(of, matrices.in), out = Matrices::of(of, matrices.out);
        if (of >= 2 * Matrices::HELD) in = model.place(of, W_IN), out = model.place(of, W_OUT);
    }
    __device__ __forceinline__ Source source(Task task) {
        const int of = least(task.layer, line.n_layers - 1);
        if (__any_sync(~0u, of != layer)) look_up(of);
        const int of_hidden = task.count * S::HIDDEN * 2;
        auto row = [&](long long matrix, int first) { return model.weights + matrix + (long long)first * S::HIDDEN; };
        switch (task.kind) {
        case SHARED:
            return {row(in, S::SHARED_AT + task.number * HiddenRows::ROWS), nullptr, of_hidden};
        case CHANNEL: {
            const T *z = row(in, 2 * task.number);
            return {row(in, S::INNER + 2 * task.number), z, of_hidden / 2};
        }
        case OUT:
            return {model.weights + out + (long long)task.number * InnerRows::ROWS * S::INNER, nullptr,
                    task.count * S::INNER * 2};
        case HEAD: return {row(model.head, task.number * HiddenRows::ROWS), nullptr, of_hidden};
        default: return {nullptr, nullptr, 0};
        }
    }
    static __device__ __forceinline__ void copy_bulk(unsigned to, const void *from, int bytes, Barrier &full) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(full.at()), "l"(LEAVES_FIRST)
                     : "memory");
    }
};
