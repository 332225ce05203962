/* A token of Mamba-2 as one line of tasks, and how the blocks of a grid share it out, as in llm/token_tasks.cuh: a task
   is a group of rows of a matrix, or of a head's state, and waits for results of tasks in front of it alone. A block
   takes the next one by a ticket as soon as it has a slot free, and what it needs of weights or states is copied then,
   long before what it waits for is there. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/tickets.cuh"
#include "../device/hopper/tma.cuh"

template <typename Type, int Hidden, int Heads, int Headdim, int Dstate, int Groups, int Width, int Threads, int Slots>
struct Sizes {
    using T = Type;
    static constexpr int HIDDEN = Hidden, HEADS = Heads, HEADDIM = Headdim, DSTATE = Dstate, GROUPS = Groups,
                         WIDTH = Width, INNER = Heads * Headdim, CHANNELS = INNER + 2 * Groups * Dstate,
                         IN_ROWS = INNER + CHANNELS + Heads;
    static constexpr int THREADS = Threads, WARPS = Threads / 32, SLOTS = Slots; // that multiply; one warp more copies
};
using S = SIZES;
using T = S::T;
constexpr int STATE_ROWS = 16; // of a task

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }

/* All threads stand along a row, WORDS words of 16 bytes each; a task has ROWS rows. */
template <int Cols> struct Rows {
    static constexpr int COLS = Cols, ROW_WORDS = Cols / 8, WORDS = (ROW_WORDS + S::THREADS - 1) / S::THREADS;
    static constexpr int ROWS = WORDS == 1 ? 8 : WORDS == 2 ? 4 : 2;
    static_assert(Cols % 8 == 0, "rows are whole words");
    static __device__ __forceinline__ bool has_word(int k, int thread) { return k * S::THREADS + thread < ROW_WORDS; }
    /* The k-th word of a thread; past the end, the row's last. */
    static __device__ __forceinline__ int word(int k, int thread) {
        return least(k * S::THREADS + thread, ROW_WORDS - 1);
    }
    static constexpr int groups(int rows) { return (rows + ROWS - 1) / ROWS; }
};
using HiddenRows = Rows<S::HIDDEN>;
using InnerRows = Rows<S::INNER>;
constexpr int HEAD_TASKS = (S::HEADDIM + STATE_ROWS - 1) / STATE_ROWS;
constexpr int SLOT = (most(most(HiddenRows::ROWS * S::HIDDEN, InnerRows::ROWS * S::INNER) * 2,
                           STATE_ROWS * S::DSTATE * 4) + 127) / 128 * 128;

enum Kind { EMBED, IN, STATE, OUT, HEAD, END };
struct Task {
    int kind, layer, number, count; // count: rows that there are, of those of a group
    __device__ __forceinline__ bool like(Task other) const { return kind == other.kind && layer == other.layer; }
};

/* The line: one EMBED, then for each layer IN, STATE and OUT, then HEAD. */
struct Line {
    int n_layers, vocab;

    __device__ __forceinline__ Task task(int n) const {
        constexpr int in = HiddenRows::groups(S::IN_ROWS), states = S::HEADS * HEAD_TASKS,
                      out = InnerRows::groups(S::HIDDEN), of_layer = in + states + out;
        if (n == 0) return {EMBED, 0, 0, 0};
        const int layer = (n - 1) / of_layer;
        int i = n - 1 - least(layer, n_layers) * of_layer;
        if (layer >= n_layers) {
            if (i >= HiddenRows::groups(vocab)) return {END, n_layers, 0, 0};
            return {HEAD, n_layers, i, least(HiddenRows::ROWS, vocab - i * HiddenRows::ROWS)};
        }
        if (i < in) return {IN, layer, i, least(HiddenRows::ROWS, S::IN_ROWS - i * HiddenRows::ROWS)};
        if ((i -= in) < states)
            return {STATE, layer, i, least(STATE_ROWS, S::HEADDIM - i % HEAD_TASKS * STATE_ROWS)};
        i -= states;
        return {OUT, layer, i, least(InnerRows::ROWS, S::HIDDEN - i * InnerRows::ROWS)};
    }
};

/* Matrices and norms of a layer: elements from the beginning of the embedding. */
enum Piece { NORM, W_IN, GATED_NORM, W_OUT, PIECES };
/* Numbers of a layer in float, one behind another. */
constexpr int CONV_WEIGHT = 0, CONV_BIAS = S::CHANNELS * S::WIDTH, DT_BIAS = CONV_BIAS + S::CHANNELS,
              A_AT = DT_BIAS + S::HEADS, D_AT = A_AT + S::HEADS, CONSTANTS = D_AT + S::HEADS;
struct Model {
    const T *weights; // the embedding, and at some distance from it all others
    const float *constants; // (n_layers, CONSTANTS)
    const long long *places; // (n_layers, PIECES)
    T *windows; // (n_layers, WIDTH - 1, CHANNELS)
    float *states; // (n_layers, HEADS, HEADDIM, DSTATE)
    long long norm, head;

    __device__ __forceinline__ const T *part(int layer, Piece piece) const {
        return weights + __ldg(places + layer * PIECES + piece);
    }
    __device__ __forceinline__ const float *constant(int layer, int which) const {
        return constants + (long long)layer * CONSTANTS + which;
    }
    /* Where the rows of a task of STATE begin. */
    __device__ __forceinline__ float *state(Task task) const {
        const int head = task.number / HEAD_TASKS, row = task.number % HEAD_TASKS * STATE_ROWS;
        return states + (((long long)task.layer * S::HEADS + head) * S::HEADDIM + row) * S::DSTATE;
    }
};

/* What a block has taken: tasks, and with each a slot of shared memory for what it reads. */
using Taken = TakenTasks<Task, S::SLOTS>;

/* The warp that takes tickets and copies. All its lanes call. */
struct Loader {
    unsigned *ticket;
    int lane;
    unsigned slots; // where they are in shared memory
    Taken &taken;
    Model model;
    Line line;
    Phase<S::SLOTS> phase;

    __device__ __forceinline__ unsigned take() const { return take_ticket(ticket, lane); }
    /* The task of a ticket, and what it reads, into a slot. */
    __device__ __forceinline__ bool put(unsigned number) {
        const Task task = line.task(__shfl_sync(~0u, number, 0));
        const Source needs = source(task); // looked up here, in front of the wait
        taken.ring.wait_empty(phase);
        Barrier &full = taken.ring.full[phase.stage];
        if (lane == 0) {
            taken.tasks[phase.stage] = task;
            if (needs.bytes) {
                full.expect(needs.bytes);
                copy_bulk(slots + phase.stage * SLOT, needs.rows, needs.bytes, full);
            } else full.arrive();
        }
        phase.advance();
        return task.kind != END;
    }

    struct Source {
        const void *rows; // which lie one behind another
        int bytes;
    };
    __device__ __forceinline__ Source source(Task task) const {
        const long long hidden = (long long)task.number * HiddenRows::ROWS * S::HIDDEN;
        const int of_hidden = task.count * S::HIDDEN * 2;
        switch (task.kind) {
        case IN: return {model.part(task.layer, W_IN) + hidden, of_hidden};
        case STATE: return {model.state(task), task.count * S::DSTATE * 4};
        case OUT:
            return {model.part(task.layer, W_OUT) + (long long)task.number * InnerRows::ROWS * S::INNER,
                    task.count * S::INNER * 2};
        case HEAD: return {model.weights + model.head + hidden, of_hidden};
        default: return {nullptr, 0};
        }
    }
    static __device__ __forceinline__ void copy_bulk(unsigned to, const void *from, int bytes, Barrier &full) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(full.at()), "l"(LEAVES_FIRST)
                     : "memory");
    }
};
