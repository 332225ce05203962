/* A token of Mamba-2 as one line of tasks, and how the blocks of a grid share it out, as in llm/token_tasks.cuh: a task
   is a group of rows of a matrix, and waits for results of tasks in front of it alone. A block takes the next one by a
   ticket as soon as it has a slot free, and its rows are copied then, long before what it waits for is there.

   in_proj's rows do not stand in the line as they stand in the matrix. First come B, C and dt, which all heads need;
   then, two channels at a time, their rows of x and of z: who has both can move these channels' states at once, and
   nothing of x and z goes from one block to another. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/tickets.cuh"
#include "../device/hopper/tma.cuh"

/* AskAhead, LookEarly, AtATime, WhileWaiting: trials (trials.py), which change when something happens, and no bit. */
template <typename Type, int Hidden, int Heads, int Headdim, int Dstate, int Width, int Threads, int Slots,
          bool AskAhead = false, bool LookEarly = false, int AtATime = 0, int WhileWaiting = 2>
struct Sizes {
    using T = Type;
    static constexpr int HIDDEN = Hidden, HEADS = Heads, HEADDIM = Headdim, DSTATE = Dstate, WIDTH = Width,
                         INNER = Heads * Headdim, CHANNELS = INNER + 2 * Dstate, // of the convolution: x, B and C
        SHARED_AT = 2 * INNER, SHARED_ROWS = 2 * Dstate + Heads; // of in_proj: B, C and dt
    static constexpr int THREADS = Threads, WARPS = Threads / 32, SLOTS = Slots; // that multiply
    static constexpr bool ASK_AHEAD = AskAhead, LOOK_EARLY = LookEarly;
    static constexpr int AT_A_TIME = AtATime, WHILE_WAITING = WhileWaiting; // slots on their way; 0: as below
};
using S = SIZES;
using T = S::T;

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }

/* All threads that multiply stand along a row, WORDS words of 16 bytes each; a task has PerTask rows. */
template <int Cols, int PerTask> struct Rows {
    static constexpr int COLS = Cols, ROWS = PerTask;
    static constexpr int ROW_WORDS = Cols / 8, WORDS = (ROW_WORDS + S::THREADS - 1) / S::THREADS;
    static_assert(Cols % 8 == 0, "rows are whole words");
    static __device__ __forceinline__ bool has_word(int k, int thread) { return k * S::THREADS + thread < ROW_WORDS; }
    /* The k-th word of a thread; past the end, the row's last. */
    static __device__ __forceinline__ int word(int k, int thread) {
        return least(k * S::THREADS + thread, ROW_WORDS - 1);
    }
    static constexpr int groups(int rows) { return (rows + ROWS - 1) / ROWS; }
};
using HiddenRows = Rows<S::HIDDEN, 4>;
using InnerRows = Rows<S::INNER, 3 * S::HIDDEN < 2 * S::INNER ? 2 : 4>;
static_assert(S::HEADDIM % 2 == 0, "both channels of a task are of one head");
/* A slot: rows, and behind them the states of two channels. */
constexpr int STATES_AT = most(HiddenRows::ROWS * S::HIDDEN, InnerRows::ROWS * S::INNER) * 2;
constexpr int STATES = 2 * S::DSTATE * 4, SLOT = (STATES_AT + STATES + 127) / 128 * 128;

/* Slots that are on their way at a time: as many as keep memory busy, and fewer while a vector is waited for, as its
   numbers stand behind them. On an H200 a token of 2.7B takes 1.60 ms with six and two of 20 KB, 1.64 with three. */
constexpr int AT_A_TIME = least(S::SLOTS, S::AT_A_TIME ? S::AT_A_TIME : most(2, 128 * 1024 / SLOT)),
              WHILE_WAITING = S::WHILE_WAITING;

/* Warps finish what the others have multiplied, a task each, by turns. No more of them than slots: none may ask for a
   slot's next round but one. */
constexpr int FINISHERS = least(8, S::SLOTS);
constexpr int BLOCK = S::THREADS + 32 * FINISHERS + 32; // one warp more copies

enum Kind { EMBED, SHARED, CHANNEL, OUT, HEAD, END };
struct Task {
    int kind, layer, number, count; // count: rows that there are, of those of a group
    /* Whether both multiply the same vector. */
    __device__ __forceinline__ bool like(Task other) const {
        return layer == other.layer && (kind == OUT) == (other.kind == OUT) && (kind == END) == (other.kind == END);
    }
};

/* The line: one EMBED, then for each layer SHARED, CHANNEL and OUT, then HEAD. */
struct Line {
    int n_layers, vocab;

    __device__ __forceinline__ Task task(int n) const {
        constexpr int all = HiddenRows::groups(S::SHARED_ROWS), channels = S::INNER / 2,
                      out = InnerRows::groups(S::HIDDEN), of_layer = all + channels + out;
        if (n == 0) return {EMBED, 0, 0, 0};
        const int layer = least((n - 1) / of_layer, n_layers);
        int i = n - 1 - layer * of_layer;
        if (layer == n_layers) {
            if (i >= HiddenRows::groups(vocab)) return {END, n_layers, 0, 0};
            return {HEAD, n_layers, i, least(HiddenRows::ROWS, vocab - i * HiddenRows::ROWS)};
        }
        if (i < all) return {SHARED, layer, i, least(HiddenRows::ROWS, S::SHARED_ROWS - i * HiddenRows::ROWS)};
        if ((i -= all) < channels) return {CHANNEL, layer, i, 4};
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

/* What a block has taken: tasks, and with each a slot of shared memory for what it reads; and the task that each
   warp will finish next, which it is told at once, long before the slot is filled. */
using Taken = TakenTasks<Task, S::SLOTS>;
struct Announced {
    Ring<FINISHERS> ring;
    Task tasks[FINISHERS];
    unsigned waits; // whether those who multiply wait for a vector; a hint, which may come late

    __device__ __forceinline__ void say(bool waiting) {
        asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&waits)), "r"((unsigned)waiting)
                     : "memory");
    }
    __device__ __forceinline__ bool hear() const {
        unsigned heard;
        asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(heard) : "r"(shared_address(&waits)) : "memory");
        return heard;
    }
};

/* Where a layer's matrices are. */
struct Matrices {
    int layer;
    const T *in, *out;

    __device__ __forceinline__ void find(const Model &model, int of) {
        layer = of, in = model.part(of, W_IN), out = model.part(of, W_OUT);
    }
};

/* The warp that takes tickets and copies. All its lanes call. */
struct Loader {
    unsigned *ticket;
    int lane;
    unsigned slots; // where they are in shared memory
    Taken &taken;
    Announced &announced;
    Model model;
    Line line;
    Phase<S::SLOTS> phase, oldest, newest; // of those that are on their way
    Phase<FINISHERS> next; // who finishes
    int asked = 0;
    Matrices here = {-1}, ahead = {-1};

    __device__ __forceinline__ unsigned take() const { return take_ticket(ticket, lane); }
    /* The task of a ticket, and what it reads, into a slot. */
    __device__ __forceinline__ bool put(unsigned number) {
        const Task task = line.task(__shfl_sync(~0u, number, 0));
        const Source needs = source(task); // looked up here, in front of the waits
        announce(task);
        if (asked++ >= AT_A_TIME) {
            taken.ring.wait_full(oldest);
            oldest.advance();
        }
        if (asked > WHILE_WAITING) {
            if (__any_sync(~0u, announced.hear())) taken.ring.wait_full(newest); // all lanes, or none
            newest.advance();
        }
        taken.ring.wait_empty(phase);
        Barrier &full = taken.ring.full[phase.stage];
        if (lane == 0) {
            taken.tasks[phase.stage] = task;
            if (needs.bytes) {
                const unsigned to = slots + phase.stage * SLOT;
                full.expect(needs.more ? 2 * needs.bytes + STATES : needs.bytes);
                copy_bulk(to, needs.rows, needs.bytes, full);
                if (needs.more) {
                    copy_bulk(to + needs.bytes, needs.more, needs.bytes, full);
                    copy_bulk(to + STATES_AT, model.state(task.layer, 2 * task.number), STATES, full);
                }
            } else full.arrive();
        }
        if constexpr (S::ASK_AHEAD) ask_ahead(task);
        phase.advance();
        if (task.kind != END) return true;
        for (int i = 1; i < FINISHERS; i++) announce(task); // each is told
        return false;
    }
    __device__ __forceinline__ void announce(Task task) {
        announced.ring.wait_empty(next);
        if (lane == 0) {
            announced.tasks[next.stage] = task;
            announced.ring.full[next.stage].arrive();
        }
        next.advance();
    }

    /* Into L2, a layer ahead: the constants and windows of the next layer, a sector or two for each pair of channels of
       this one. Who finishes a task reads them in front of it, one task after another, and in memory they would stand
       behind all weights that are on their way: a wait of microseconds, in which a warp finishes nothing. */
    __device__ __forceinline__ void ask_ahead(Task task) const {
        constexpr int SECTOR = 32, of_constants = (CONSTANTS * 4 + SECTOR - 1) / SECTOR,
                      of_windows = ((S::WIDTH - 1) * S::CHANNELS * 2 + SECTOR - 1) / SECTOR,
                      each = (of_constants + of_windows + S::INNER / 2 - 1) / (S::INNER / 2);
        const int next = task.layer + 1;
        if (task.kind != CHANNEL || next >= line.n_layers) return;
        const char *constants = reinterpret_cast<const char *>(model.constant(next, 0));
        const char *windows = reinterpret_cast<const char *>(model.windows +
                                                             (long long)next * (S::WIDTH - 1) * S::CHANNELS);
#pragma unroll 1
        for (int i = lane; i < each; i += 32) {
            const int at = task.number * each + i;
            const char *from = at < of_constants ? constants + at * SECTOR : windows + (at - of_constants) * SECTOR;
            if (at < of_constants + of_windows) asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
        }
    }

    /* A group of rows, which lie one behind another, and as many more, of channels that have states, or null. */
    struct Source {
        const T *rows, *more;
        int bytes; // of each
    };
    __device__ __forceinline__ Source source(Task task) {
        if (task.layer != here.layer && task.layer < line.n_layers) { // places are read a layer ahead, or take a while
            if (ahead.layer == task.layer) here = ahead;
            else here.find(model, task.layer);
            ahead.find(model, least(task.layer + 1, line.n_layers - 1));
        }
        const int of_hidden = task.count * S::HIDDEN * 2;
        auto row = [&](const T *matrix, int first) { return matrix + (long long)first * S::HIDDEN; };
        switch (task.kind) {
        case SHARED:
            return {row(here.in, S::SHARED_AT + task.number * HiddenRows::ROWS), nullptr, of_hidden};
        case CHANNEL: {
            const T *z = row(here.in, 2 * task.number);
            return {row(z, S::INNER), z, of_hidden / 2};
        }
        case OUT:
            return {here.out + (long long)task.number * InnerRows::ROWS * S::INNER, nullptr, task.count * S::INNER * 2};
        case HEAD: return {row(model.weights + model.head, task.number * HiddenRows::ROWS), nullptr, of_hidden};
        default: return {nullptr, nullptr, 0};
        }
    }
    static __device__ __forceinline__ void copy_bulk(unsigned to, const void *from, int bytes, Barrier &full) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(full.at()), "l"(LEAVES_FIRST)
                     : "memory");
    }
};
