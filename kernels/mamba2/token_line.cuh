/* A token of Mamba-2 as one line of tasks, and how the blocks of a grid share it out, as in llm/token_tasks.cuh: a task
   is a group of rows of a matrix, and waits for results of tasks in front of it alone. A block takes the next one by a
   ticket as soon as it has a slot free, and its rows are copied then, long before what it waits for is there.

   in_proj's rows do not stand in the line as they stand in the matrix. First come B, C and dt, which all heads need;
   then, two channels at a time, their rows of x and of z: who has both can move these channels' states at once, and
   nothing of x and z goes from one block to another. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/tickets.cuh"

/* Those from Ticket on change when something happens, and no bit: one_launch.py has what trials.py found best. */
template <typename Type, int Hidden, int Heads, int Headdim, int Dstate, int Width, int Threads, int Slots,
          int Ticket, int Finishers, bool WriteLate, bool StatesLeave,
          int AtATime = 0, int WhileWaiting = 2>
struct Sizes {
    using T = Type;
    static constexpr int HIDDEN = Hidden, HEADS = Heads, HEADDIM = Headdim, DSTATE = Dstate, WIDTH = Width,
                         INNER = Heads * Headdim, CHANNELS = INNER + 2 * Dstate, // of the convolution: x, B and C
        SHARED_AT = 2 * INNER, SHARED_ROWS = 2 * Dstate + Heads; // of in_proj: B, C and dt
    static constexpr int THREADS = Threads, WARPS = Threads / 32, SLOTS = Slots; // that multiply
    static constexpr int TICKET = Ticket;         // neighbouring tasks of a ticket
    static constexpr int FINISHERS = Finishers;   // warps that finish, at most
    static constexpr bool WRITE_LATE = WriteLate; // windows move behind the sums, not in front of them
    static constexpr bool STATES_LEAVE = StatesLeave; // L2 before all else, so that windows and constants stay
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
constexpr int FINISHERS = least(S::FINISHERS, S::SLOTS);
constexpr int BLOCK = S::THREADS + 32 * FINISHERS + 32; // one warp more copies
constexpr int TICKET = least(S::TICKET, FINISHERS); // tasks of a ticket: each is told to a warp of its own

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

    __device__ __forceinline__ long long place(int layer, Piece piece) const {
        return __ldg(places + layer * PIECES + piece);
    }
    __device__ __forceinline__ const T *part(int layer, Piece piece) const { return weights + place(layer, piece); }
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
