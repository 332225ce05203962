/* A token's work as one line of tasks, and how the blocks of a grid share it out.

   A task is a group of rows of a matrix, a group of tokens of a cache, or a part of a merge. They stand in the order of
   the model's steps, layer after layer, and a block that has room for another takes the next one: by a ticket. So fast
   multiprocessors take more, and nobody has a share to finish while others have none left.

   A task may wait for results of tasks in front of it, never of those behind. Each of these was taken by a block that
   runs, which does its tasks in their order: so the first unfinished one waits for nothing. The line moves on however
   many blocks the card has room for.

   What a task needs of weights and of older tokens is copied as soon as the block has a slot free, long before what it
   waits for is there. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/tma.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename Type, int Hidden, int Heads, int KvHeads, int HeadDim, int Ffn, bool Biases, bool HeadNorms, int Slot,
          int Stages>
struct Sizes {
    using T = Type;
    static constexpr int HIDDEN = Hidden, HEADS = Heads, KV_HEADS = KvHeads, DIM = HeadDim, FFN = Ffn;
    static constexpr bool BIASES = Biases, HEAD_NORMS = HeadNorms;
    static constexpr int SLOT = Slot, STAGES = Stages; // bytes of a slot, and how many there are
};
using S = SIZES;
using T = S::T;
constexpr int SLOT = S::SLOT, STAGES = S::STAGES;
constexpr int GROUP = S::HEADS / S::KV_HEADS; // query heads of a kv head
constexpr int Q_ROWS = S::HEADS * S::DIM, KV_ROWS = S::KV_HEADS * S::DIM, QKV_ROWS = Q_ROWS + 2 * KV_ROWS;
constexpr int THREADS = 512, WARPS = THREADS / 32; // that multiply; one warp more copies
constexpr int TOKENS = 64 < SLOT / (4 * S::DIM) ? 64 : SLOT / (4 * S::DIM) / 8 * 8; // of a group
constexpr int CHUNK = 32, CHUNKS = (S::DIM + CHUNK - 1) / CHUNK; // channels of a merge's part

/* The parts of a layer. Its matrices are (outputs, inputs), W_q, W_k and W_v one above another. */
enum Piece { ATTENTION_NORM, W_QKV, BIAS, Q_NORM, K_NORM, W_OUTPUT, FFN_NORM, W_GATE, W_UP, W_DOWN, KEYS, VALUES, PIECES };

/* Where everything lies: elements from the beginning of one of three tensors. */
struct Model {
    const T *weights; // the embedding, and at some distance from it all others
    T *keys, *values;
    const long long *places; // (n_layers, PIECES)
    long long norm, head;

    __device__ __forceinline__ long long place(int layer, Piece piece) const {
        return __ldg(places + layer * PIECES + piece);
    }
    __device__ __forceinline__ const T *part(int layer, Piece piece) const { return weights + place(layer, piece); }
    __device__ __forceinline__ T *keys_of(int layer) const { return keys + place(layer, KEYS); }
    __device__ __forceinline__ T *values_of(int layer) const { return values + place(layer, VALUES); }
};

/* How the threads stand along the rows of a group: teams of threads have a row each, WORDS words of 16 bytes a thread,
   and PER_TEAM rows one after another. */
template <int Cols> struct Rows {
    static constexpr int COLS = Cols, ROW_WORDS = Cols / 8;
    static constexpr int team() {
        int team = 32;
        while (team < ROW_WORDS && team < THREADS) team *= 2;
        return team;
    }
    static constexpr int TEAM = team(), TEAMS = THREADS / TEAM, WORDS = (ROW_WORDS + TEAM - 1) / TEAM;
    static constexpr int fit = SLOT / (2 * Cols * TEAMS);
    static constexpr int PER_TEAM = fit >= 4 ? 4 : fit >= 2 ? 2 : 1, ROWS = TEAMS * PER_TEAM;
    static_assert(Cols % 8 == 0 && fit >= 1, "rows are whole words, and a row of each team fits into a slot");
    static constexpr int groups(long long rows, int per_group = ROWS) { return (rows + per_group - 1) / per_group; }
};
using HiddenRows = Rows<S::HIDDEN>;
using HeadRows = Rows<Q_ROWS>;
using FfnRows = Rows<S::FFN>;
constexpr int HALF = HiddenRows::ROWS / 2; // rows of gate, and as many of up
static_assert(HiddenRows::ROWS % 2 == 0, "a slot holds a row of gate and one of up");

enum Kind { EMBED, QKV, ATTEND, MERGE, OUTPUT, GLU, DOWN, HEAD, END };
struct Task {
    int kind, layer, number, count; // count: rows or tokens that there are, of those of a group
    __device__ __forceinline__ bool like(Task other) const { return kind == other.kind && layer == other.layer; }
};

/* The line: one EMBED, then for each layer QKV … DOWN, then HEAD. */
struct Line {
    int n_layers, token_groups, tokens; // tokens that lie in the cache: all but the newest
    long long vocab;

    __device__ __forceinline__ int attends() const { return token_groups * S::KV_HEADS; }
    /* Ticket number n of the launch. */
    __device__ __forceinline__ Task task(unsigned n) const {
        constexpr int qkv = HiddenRows::groups(QKV_ROWS), merges = S::HEADS * CHUNKS, out = HeadRows::groups(S::HIDDEN),
                      glu = HiddenRows::groups(S::FFN, HALF), down = FfnRows::groups(S::HIDDEN);
        if (n == 0) return {EMBED, 0, 0, 0};
        const int of_layer = qkv + attends() + merges + out + glu + down;
        const int layer = (n - 1) / of_layer;
        int i = n - 1 - layer * of_layer;
        if (layer >= n_layers) {
            i = n - 1 - n_layers * of_layer;
            if (i >= HiddenRows::groups(vocab)) return {END, n_layers, 0, 0};
            return {HEAD, n_layers, i, (int)min((long long)HiddenRows::ROWS, vocab - (long long)i * HiddenRows::ROWS)};
        }
        if (i < qkv) return {QKV, layer, i, min(HiddenRows::ROWS, QKV_ROWS - i * HiddenRows::ROWS)};
        if ((i -= qkv) < attends()) return {ATTEND, layer, i, min(TOKENS, tokens - i / S::KV_HEADS * TOKENS)};
        if ((i -= attends()) < merges) return {MERGE, layer, i, 0};
        if ((i -= merges) < out) return {OUTPUT, layer, i, min(HeadRows::ROWS, S::HIDDEN - i * HeadRows::ROWS)};
        if ((i -= out) < glu) return {GLU, layer, i, min(HALF, S::FFN - i * HALF)};
        i -= glu;
        return {DOWN, layer, i, min(FfnRows::ROWS, S::HIDDEN - i * FfnRows::ROWS)};
    }
};

/* Slots of shared memory for what tasks need, and the tasks themselves. */
struct Slots {
    Ring<STAGES> ring;
    Task tasks[STAGES];
};

/* Start to copy `bytes` bytes, a multiple of 16, which arrive at `full`. */
__device__ __forceinline__ void copy_bulk(unsigned to, const void *from, int bytes, Barrier &full, CachePolicy policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
                 "%4;" ::"r"(to), "l"(from), "r"(bytes), "r"(full.at()), "l"(policy) : "memory");
}

/* The warp that takes tickets and copies. All its lanes call. */
struct Loader {
    Model model;
    Line line;
    Slots &slots;
    unsigned memory; // of the slots
    unsigned *ticket;
    int lane;
    Phase<STAGES> phase;

    __device__ __forceinline__ unsigned take() const { return lane == 0 ? atomicAdd(ticket, 1u) : 0; }

    __device__ __forceinline__ void run() {
        unsigned first = take(), second = take(); // two, so that one is there when it is wanted
        for (;;) {
            if (!load(first)) return;
            first = take();
            if (!load(second)) return;
            second = take();
        }
    }
    __device__ __forceinline__ bool load(unsigned taken) {
        const Task task = line.task(__shfl_sync(~0u, taken, 0));
        slots.ring.wait_empty(phase);
        if (lane == 0) slots.tasks[phase.stage] = task;
        switch (task.kind) {
        case QKV: rows<S::HIDDEN>(model.part(task.layer, W_QKV), task.number, HiddenRows::ROWS, task.count); break;
        case ATTEND: tokens(task); break;
        case OUTPUT: rows<Q_ROWS>(model.part(task.layer, W_OUTPUT), task.number, HeadRows::ROWS, task.count); break;
        case GLU: {
            const T *up = model.part(task.layer, W_UP);
            rows<S::HIDDEN>(model.part(task.layer, W_GATE), task.number, HALF, task.count, up);
            break;
        }
        case DOWN: rows<S::FFN>(model.part(task.layer, W_DOWN), task.number, FfnRows::ROWS, task.count); break;
        case HEAD: rows<S::HIDDEN>(model.weights + model.head, task.number, HiddenRows::ROWS, task.count); break;
        default:
            if (lane == 0) slots.ring.full[phase.stage].arrive();
        }
        phase.advance();
        return task.kind != END;
    }
    /* A group of rows, which lie one behind another; and as many of a second matrix, HALF rows further. */
    template <int COLS>
    __device__ __forceinline__ void rows(const T *matrix, int group, int per_group, int count, const T *more = nullptr) {
        if (lane) return;
        Barrier &full = slots.ring.full[phase.stage];
        const unsigned to = memory + phase.stage * SLOT;
        const long long at = (long long)group * per_group * COLS;
        const int bytes = count * COLS * 2;
        full.expect(more ? 2 * bytes : bytes);
        copy_bulk(to, matrix + at, bytes, full, LEAVES_FIRST);
        if (more) copy_bulk(to + HALF * COLS * 2, more + at, bytes, full, LEAVES_FIRST);
    }
    /* Keys and values of a kv head, of a group of tokens: rows of head_dim numbers that lie apart. */
    __device__ __forceinline__ void tokens(Task task) {
        Barrier &full = slots.ring.full[phase.stage];
        const unsigned to = memory + phase.stage * SLOT;
        const long long first = (long long)task.number / S::KV_HEADS * TOKENS;
        const long long at = first * KV_ROWS + task.number % S::KV_HEADS * S::DIM;
        const T *keys = model.keys_of(task.layer) + at, *values = model.values_of(task.layer) + at;
        if (lane == 0) full.expect(task.count * S::DIM * 4);
        __syncwarp();
        for (int i = lane; i < 2 * task.count; i += 32) {
            const int token = i / 2;
            copy_bulk(to + (i % 2 * TOKENS + token) * S::DIM * 2, (i % 2 ? values : keys) + (long long)token * KV_ROWS,
                      S::DIM * 2, full, LEAVES_FIRST);
        }
    }
};
