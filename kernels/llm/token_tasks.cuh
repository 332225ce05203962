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
#include "../attention/tile_products.cuh"
#include "../device/hidden.cuh"
#include "../device/hopper/tickets.cuh"
#include "../device/hopper/tma.cuh"

template <int Hidden, int Heads, int Ffn, bool Biases, bool HeadNorms, int Slot, int Slots> struct Sizes {
    static constexpr int HIDDEN = Hidden, HEADS = Heads, FFN = Ffn; // those of a head: SHAPE
    static constexpr bool BIASES = Biases, HEAD_NORMS = HeadNorms;
    static constexpr int SLOT = Slot, SLOTS = Slots; // bytes of a slot, and how many there are
};
using S = SIZES;
constexpr int SLOT = S::SLOT;
constexpr int KV_HEADS = S::HEADS / GROUP, Q_ROWS = S::HEADS * HEAD_DIM, KV_ROWS = KV_HEADS * HEAD_DIM;
constexpr int QKV_ROWS = Q_ROWS + 2 * KV_ROWS;
constexpr int MULTIPLIERS = 16, THREADS = 32 * MULTIPLIERS; // warps that multiply; one more copies
constexpr int FIT = SLOT / (4 * TILE_SIZE), TILES = FIT < 4 ? FIT : 4, TOKENS = TILES * TILE; // of a group of tokens
constexpr int FEW_GROUPS = 4; // of tokens, that each block merges for itself
constexpr int CHUNK = 32, CHUNKS = (HEAD_DIM + CHUNK - 1) / CHUNK; // channels of a merge's part
static_assert(GROUP <= 8 && TILE == 16 && TILES > 0, "a kv head's queries are half the rows of an mma");

/* The parts of a layer. Its matrices are (outputs, inputs), W_q, W_k and W_v one above another. */
enum Piece {
    ATTENTION_NORM, W_QKV, BIAS, Q_NORM, K_NORM, W_OUTPUT, FFN_NORM, W_GATE, W_UP, W_DOWN, KEYS, VALUES, PIECES
};

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
    /* The k-th word of a thread in its row, if there is one; else the row's last. */
    static __device__ __forceinline__ bool has_word(int k, int thread) { return k * TEAM + thread % TEAM < ROW_WORDS; }
    static __device__ __forceinline__ int word(int k, int thread) {
        return has_word(k, thread) ? k * TEAM + thread % TEAM : ROW_WORDS - 1;
    }
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
    __device__ __forceinline__ bool has_rows() const { // of a matrix
        return kind == QKV || kind == OUTPUT || kind == GLU || kind == DOWN || kind == HEAD;
    }
};

/* The line: one EMBED, then for each layer QKV … DOWN, then HEAD. */
struct Line {
    int n_layers, token_groups, tokens; // tokens that lie in the cache: all but the newest
    long long vocab;

    __device__ __forceinline__ int attends() const { return token_groups * KV_HEADS; }
    /* Whether groups of tokens are merged by tasks; few of them each block merges for itself. */
    __device__ __forceinline__ bool merged() const { return token_groups > FEW_GROUPS; }
    /* Ticket number n of the launch. */
    __device__ __forceinline__ Task task(unsigned n) const {
        constexpr int qkv = HiddenRows::groups(QKV_ROWS), out = HeadRows::groups(S::HIDDEN),
                      glu = HiddenRows::groups(S::FFN, HALF), down = FfnRows::groups(S::HIDDEN);
        if (n == 0) return {EMBED, 0, 0, 0};
        const int merges = merged() ? S::HEADS * CHUNKS : 0;
        const int of_layer = qkv + attends() + merges + out + glu + down;
        const int layer = (n - 1) / of_layer;
        int i = n - 1 - layer * of_layer;
        if (layer >= n_layers) {
            i = n - 1 - n_layers * of_layer;
            if (i >= HiddenRows::groups(vocab)) return {END, n_layers, 0, 0};
            return {HEAD, n_layers, i, (int)min((long long)HiddenRows::ROWS, vocab - (long long)i * HiddenRows::ROWS)};
        }
        if (i < qkv) return {QKV, layer, i, min(HiddenRows::ROWS, QKV_ROWS - i * HiddenRows::ROWS)};
        if ((i -= qkv) < attends()) return {ATTEND, layer, i, min(TOKENS, tokens - i / KV_HEADS * TOKENS)};
        if ((i -= attends()) < merges) return {MERGE, layer, i, 0};
        if ((i -= merges) < out) return {OUTPUT, layer, i, min(HeadRows::ROWS, S::HIDDEN - i * HeadRows::ROWS)};
        if ((i -= out) < glu) return {GLU, layer, i, min(HALF, S::FFN - i * HALF)};
        i -= glu;
        return {DOWN, layer, i, min(FfnRows::ROWS, S::HIDDEN - i * FfnRows::ROWS)};
    }
};

/* What a block has taken: tasks, and with each a slot of shared memory for what it reads. */
using Taken = TakenTasks<Task, S::SLOTS>;

/* Start to copy `bytes` bytes, a multiple of 16, which arrive at `full`. */
__device__ __forceinline__ void copy_bulk(unsigned to, const void *from, int bytes, Barrier &full, CachePolicy policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(full.at()), "l"(policy) : "memory");
}

/* One arrival more is pending until all that this thread has copied with cp.async has come. (Barrier's
   arrive_with_copies is for arrivals that the barrier was told of.) */
__device__ __forceinline__ void arrive_behind_copies(Barrier &full) {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(full.at()) : "memory");
}

/* The warp that takes tickets and copies. All its lanes call. */
struct Loader {
    Model model;
    Line line;
    Taken &taken;
    unsigned memory; // of the slots
    unsigned *ticket;
    int lane;
    Phase<S::SLOTS> phase;

    __device__ __forceinline__ unsigned take() const { return take_ticket(ticket, lane); }
    /* The task of a ticket, and what it reads, into a slot. One arrival fills a slot, and one of each warp empties it:
       arrivals have their price, so there are no more. */
    __device__ __forceinline__ bool put(unsigned number) {
        const Task task = line.task(__shfl_sync(~0u, number, 0));
        const Source from = source(task); // looked up here, in front of the wait
        taken.ring.wait_empty(phase);
        Barrier &full = taken.ring.full[phase.stage];
        if (lane == 0) taken.tasks[phase.stage] = task;
        if (task.kind == ATTEND) {
            tokens(task, from);
            arrive_behind_copies(full);
            __syncwarp();
        }
        if (lane == 0) {
            if (task.has_rows()) rows(from, full);
            else full.arrive();
        }
        phase.advance();
        return task.kind != END;
    }

    /* A group of rows, which lie one behind another, and as many of a second matrix, or null; or keys and values. */
    struct Source {
        const T *rows, *more;
        int bytes; // of each
    };
    __device__ __forceinline__ Source source(Task task) const {
        auto group = [&](Piece piece, int cols, int per_group) {
            return model.part(task.layer, piece) + (long long)task.number * per_group * cols;
        };
        const int hidden = task.count * S::HIDDEN * 2;
        switch (task.kind) {
        case QKV: return {group(W_QKV, S::HIDDEN, HiddenRows::ROWS), nullptr, hidden};
        case ATTEND: return {model.keys_of(task.layer), model.values_of(task.layer), 0};
        case OUTPUT: return {group(W_OUTPUT, Q_ROWS, HeadRows::ROWS), nullptr, task.count * Q_ROWS * 2};
        case GLU: return {group(W_GATE, S::HIDDEN, HALF), group(W_UP, S::HIDDEN, HALF), hidden};
        case DOWN: return {group(W_DOWN, S::FFN, FfnRows::ROWS), nullptr, task.count * S::FFN * 2};
        default: { // HEAD, and those that need nothing
            const long long row = (long long)task.number * HiddenRows::ROWS;
            return {model.weights + model.head + row * S::HIDDEN, nullptr, hidden};
        }
        }
    }
    __device__ __forceinline__ void rows(Source source, Barrier &full) {
        const unsigned to = memory + phase.stage * SLOT;
        full.expect(source.more ? 2 * source.bytes : source.bytes);
        copy_bulk(to, source.rows, source.bytes, full, LEAVES_FIRST);
        if (source.more) copy_bulk(to + HALF * S::HIDDEN * 2, source.more, source.bytes, full, LEAVES_FIRST);
    }
    /* Keys and values of a kv head, of a group of tokens, in tiles as tile_products.cuh has them; zeros past the end.
       Their rows lie apart: threads copy them, as bulk copies of so few bytes are slow. */
    __device__ __forceinline__ void tokens(Task task, Source cache) {
        const long long first = (long long)(task.number / KV_HEADS) * TOKENS;
        const long long at = first * KV_ROWS + task.number % KV_HEADS * HEAD_DIM;
        const T *keys = cache.rows + at, *values = cache.more + at;
        const unsigned to = hidden(memory + phase.stage * SLOT, lane);
        const CachePolicy once = evict_first();
        if (32 % WORDS == 0 && TOKENS * WORDS % 32 == 0 && task.count == TOKENS) {
            constexpr int EACH = 32 / WORDS; // tokens of the warp at a time
            const int mine = lane / WORDS, word = lane % WORDS;
            const T *key = keys + (long long)mine * KV_ROWS + word * 8, *value = values + (key - keys);
#pragma unroll
            for (int i = 0; i < TOKENS / EACH; i++) {
                const int token = i * EACH + mine, tile = i * EACH / TILE;
                const unsigned place = to + (tile * 2 * TILE_SIZE + place_of(token % TILE, word)) * BYTES;
                copy_async(place, key + i * EACH * KV_ROWS, once);
                copy_async(place + TILE_SIZE * BYTES, value + i * EACH * KV_ROWS, once);
            }
            return;
        }
#pragma unroll 4
        for (int i = lane; i < TOKENS * WORDS; i += 32) {
            const int token = i / WORDS, word = i % WORDS;
            const long long from = (long long)token * KV_ROWS + word * 8;
            const unsigned place = to + (token / TILE * 2 * TILE_SIZE + place_of(token % TILE, word)) * BYTES;
            if (token < task.count) {
                copy_async(place, keys + from, once);
                copy_async(place + TILE_SIZE * BYTES, values + from, once);
            } else {
                copy_async_or_zero(place, keys, false);
                copy_async_or_zero(place + TILE_SIZE * BYTES, keys, false);
            }
        }
    }
};
