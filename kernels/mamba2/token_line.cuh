/* A token of Mamba-2 as one line of tasks, and how the blocks of a grid share it out, as in llm/token_tasks.cuh: a task
   is a group of rows of a matrix, and waits for results of tasks in front of it alone. A block takes the next one by a
   ticket as soon as it has a slot free, and its rows are copied then, long before what it waits for is there.

   in_proj's rows do not stand in the line as they stand in the matrix. First come B, C and dt, which all heads need;
   then, for a few channels of a head at a time, the rows of x and those of z: who has both can move these channels'
   states at once, and nothing of x and z goes from one block to another. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/tickets.cuh"
#include "../device/hopper/tma.cuh"

template <typename Type, int Hidden, int Heads, int Headdim, int Dstate, int Width, int Threads, int Slots>
struct Sizes {
    using T = Type;
    static constexpr int HIDDEN = Hidden, HEADS = Heads, HEADDIM = Headdim, DSTATE = Dstate, WIDTH = Width,
                         INNER = Heads * Headdim, CHANNELS = INNER + 2 * Dstate, // of the convolution: x, B and C
        SHARED_AT = 2 * INNER, SHARED_ROWS = 2 * Dstate + Heads; // of in_proj: B, C and dt
    static constexpr int THREADS = Threads, WARPS = Threads / 32, SLOTS = Slots; // that multiply
};
using S = SIZES;
using T = S::T;

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
constexpr int HALF = HiddenRows::ROWS / 2; // rows of x in a slot, and as many of z
static_assert(HALF % 2 == 0 && S::HEADDIM % 2 == 0, "channels are two by two");
constexpr int HEAD_TASKS = (S::HEADDIM + HALF - 1) / HALF;
constexpr int SLOT = (most(HiddenRows::ROWS * S::HIDDEN, InnerRows::ROWS * S::INNER) * 2 + 127) / 128 * 128;

/* Slots that are on their way at a time. More would bring weights no sooner: this many keep memory busy. But what
   blocks hand to each other would wait behind them. */
constexpr int AT_A_TIME = least(S::SLOTS, most(2, 80 * 1024 / SLOT));

/* Warps that finish what the others have multiplied: teams take the tasks by turns, a warp of a team has two channels. */
constexpr int TEAMS = 4, PAIRS = HALF / 2, FINISHERS = TEAMS * PAIRS;
/* Groups of S::THREADS threads that multiply, by turns, too: one's loads fill the time of the other's waits. */
constexpr int GROUPS = 2;
static_assert(TEAMS % GROUPS == 0, "a team is of one group");
constexpr int BLOCK = GROUPS * S::THREADS + 32 * FINISHERS + 32; // one warp more copies

enum Kind { EMBED, SHARED, CHANNEL, OUT, HEAD, END };
struct Task {
    int kind, layer, number, count; // count: rows that there are, of those of a group; of CHANNEL, of x
    /* Whether both multiply the same vector. */
    __device__ __forceinline__ bool like(Task other) const {
        return layer == other.layer && (kind == OUT) == (other.kind == OUT) && (kind == END) == (other.kind == END);
    }
    /* Whether the slot has a row r. */
    __device__ __forceinline__ bool has(int r) const { return (kind == CHANNEL ? r % HALF : r) < count; }
};

/* The line: one EMBED, then for each layer SHARED, CHANNEL and OUT, then HEAD. */
struct Line {
    int n_layers, vocab;

    __device__ __forceinline__ Task task(int n) const {
        constexpr int all = HiddenRows::groups(S::SHARED_ROWS), channels = S::HEADS * HEAD_TASKS,
                      out = InnerRows::groups(S::HIDDEN), of_layer = all + channels + out;
        if (n == 0) return {EMBED, 0, 0, 0};
        const int layer = least((n - 1) / of_layer, n_layers);
        int i = n - 1 - layer * of_layer;
        if (layer == n_layers) {
            if (i >= HiddenRows::groups(vocab)) return {END, n_layers, 0, 0};
            return {HEAD, n_layers, i, least(HiddenRows::ROWS, vocab - i * HiddenRows::ROWS)};
        }
        if (i < all) return {SHARED, layer, i, least(HiddenRows::ROWS, S::SHARED_ROWS - i * HiddenRows::ROWS)};
        if ((i -= all) < channels) return {CHANNEL, layer, i, least(HALF, S::HEADDIM - i % HEAD_TASKS * HALF)};
        i -= channels;
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
    /* The states of a channel, of INNER. */
    __device__ __forceinline__ float *state(int layer, int channel) const {
        return states + ((long long)layer * S::INNER + channel) * S::DSTATE;
    }
};

/* The first channel of a task of CHANNEL. */
__device__ __forceinline__ int first_channel(Task task) {
    return task.number / HEAD_TASKS * S::HEADDIM + task.number % HEAD_TASKS * HALF;
}

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
    Phase<S::SLOTS> phase, oldest; // of those that are on their way
    int asked = 0;

    __device__ __forceinline__ unsigned take() const { return take_ticket(ticket, lane); }
    /* The task of a ticket, and what it reads, into a slot. */
    __device__ __forceinline__ bool put(unsigned number) {
        const Task task = line.task(__shfl_sync(~0u, number, 0));
        const Source needs = source(task); // looked up here, in front of the wait
        if (asked++ >= AT_A_TIME) {
            taken.ring.wait_full(oldest);
            oldest.advance();
        }
        taken.ring.wait_empty(phase);
        Barrier &full = taken.ring.full[phase.stage];
        if (lane == 0) {
            taken.tasks[phase.stage] = task;
            if (needs.bytes) {
                const unsigned to = slots + phase.stage * SLOT;
                full.expect(needs.more ? 2 * needs.bytes : needs.bytes);
                copy_bulk(to, needs.rows, needs.bytes, full);
                if (needs.more) copy_bulk(to + HALF * S::HIDDEN * 2, needs.more, needs.bytes, full);
            } else full.arrive();
        }
        if (task.kind == CHANNEL) fetch(task);
        phase.advance();
        if (task.kind != END) return true;
        for (int team = 1; team < TEAMS; team++) { // each is told
            taken.ring.wait_empty(phase);
            if (lane == 0) {
                taken.tasks[phase.stage] = task;
                taken.ring.full[phase.stage].arrive();
            }
            phase.advance();
        }
        return false;
    }

    /* A group of rows, which lie one behind another, and as many more, or null. */
    struct Source {
        const T *rows, *more;
        int bytes; // of each
    };
    __device__ __forceinline__ Source source(Task task) const {
        const int of_hidden = task.count * S::HIDDEN * 2;
        auto row = [&](const T *matrix, int first) { return matrix + (long long)first * S::HIDDEN; };
        switch (task.kind) {
        case SHARED:
            return {row(model.part(task.layer, W_IN), S::SHARED_AT + task.number * HiddenRows::ROWS), nullptr,
                    of_hidden};
        case CHANNEL: {
            const T *z = row(model.part(task.layer, W_IN), first_channel(task));
            return {row(z, S::INNER), z, of_hidden};
        }
        case OUT:
            return {model.part(task.layer, W_OUT) + (long long)task.number * InnerRows::ROWS * S::INNER, nullptr,
                    task.count * S::INNER * 2};
        case HEAD: return {row(model.weights + model.head, task.number * HiddenRows::ROWS), nullptr, of_hidden};
        default: return {nullptr, nullptr, 0};
        }
    }
    /* What else a task's channels need, as far as L2: states, windows and constants. */
    __device__ __forceinline__ void fetch(Task task) const {
        const int channel = first_channel(task), head = task.number / HEAD_TASKS;
        const float *states = model.state(task.layer, channel);
        for (int at = lane * 32; at < task.count * S::DSTATE; at += 32 * 32) fetch_line(states + at);
        if (lane < S::WIDTH - 1)
            fetch_line(model.windows + ((long long)task.layer * (S::WIDTH - 1) + lane) * S::CHANNELS + channel);
        else if (lane >= 27) {
            const int which = lane == 27 ? CONV_WEIGHT : lane == 28 ? CONV_BIAS : lane == 29 ? A_AT : lane == 30 ? D_AT : DT_BIAS;
            fetch_line(model.constant(task.layer, which) + (lane == 27 ? channel * S::WIDTH : lane == 28 ? channel : head));
        }
    }
    static __device__ __forceinline__ void fetch_line(const void *at) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
    static __device__ __forceinline__ void copy_bulk(unsigned to, const void *from, int bytes, Barrier &full) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(full.at()), "l"(LEAVES_FIRST)
                     : "memory");
    }
};
