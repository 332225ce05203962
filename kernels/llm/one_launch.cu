/* A whole token in one launch: steps 1 to 9 of ref.llm.

   weights    the embedding (vocab, hidden); where all other weights lie, counted from there, `places` says (Model in
              token_tasks.cuh), norm_at and head_at
   turns      (head_dim / 2,) double, as in rope_append.cu
   token      (1,); outside of the vocabulary: NaN
   kv_len     (1,): tokens with this one; outside of 1 … capacity nothing is done
   keys, values   of layer 0, (capacity, n_kv_heads, head_dim); those of the others at places
   logits     (vocab,)
   vectors    dated numbers (Vectors in token_vectors.cuh), 0 before the first launch
   state      [0]: tickets taken, 0 between launches; [1]: launches so far; [2]: blocks that are done, 0 between them

   The model is a line of tasks, and blocks take them by tickets (token_tasks.cuh). One warp of a block takes them, and
   has what they need of weights copied into slots long before they can begin; sixteen warps multiply. There is no
   barrier of the grid: a vector's numbers tell themselves that they are there (dated.cuh).

   Moves the weights once, and 4 · kv_len · n_kv_heads · head_dim bytes a layer. Compile with SHAPE and SCHEDULE of
   attention/shape.cuh (four warps, tiles of 16 tokens, one head tile), SIZES (token_tasks.cuh), and MEMORY: bytes that
   a block has beside its slots. Launch with THREADS + 32 threads on any number of blocks, best one for each
   multiprocessor, with SLOTS * SLOT + MEMORY bytes of shared memory. */
#ifndef SHAPE
#define SHAPE Shape<__half, 128, 4>
#define SCHEDULE Schedule<4, 16, 1, false, false>
#define SIZES Sizes<4096, 32, 14336, false, false, 32768, 6>
#define MEMORY 32768
#endif
#include "../device/grid.cuh"
#include "token_attention.cuh"
#include "token_vectors.cuh"

/* What the sums of a block's rows need: one of each warp along a row. By turns, so that one may be read meanwhile:
   each is written again behind the barrier of the other, so only tasks with a barrier are counted for it. */
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int MOST_ROWS = most(HiddenRows::ROWS, most(HeadRows::ROWS, FfnRows::ROWS));
struct Memory {
    Taken taken;
    AttentionMemory attention;
    MergeMemory merges[2];
    float partial[2][MOST_ROWS][MULTIPLIERS + 1];
    float squares[2][MULTIPLIERS];
    Turns turns[32]; // of each lane
};

/* The warps that multiply. */
struct Worker {
    Model model;
    Line line;
    T *logits, *slots_memory;
    Vectors vectors;
    Memory &memory;
    unsigned first_date;
    float eps;
    int thread;
    long long token;
    Phase<S::SLOTS> phase;
    unsigned count = 0, norms = 0, attends = 0; // tasks with a barrier, vectors normed, tasks of attention

    __device__ __forceinline__ unsigned date(int layer) const { return first_date + layer; }
    /* The next task, when what it reads of weights or tokens is there. */
    __device__ __forceinline__ Task wait_task() const {
        memory.taken.ring.wait_full(phase);
        return memory.taken.tasks[phase.stage];
    }
    __device__ __forceinline__ T *slot() const { return slots_memory + phase.stage * (SLOT / 2); }
    /* This warp needs task and slot no more. */
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (thread % 32 == 0) memory.taken.ring.release(phase);
        phase.advance();
    }

    __device__ __forceinline__ void run() {
        for (;;) {
            const Task task = wait_task();
            const unsigned now = date(task.layer);
            switch (task.kind) {
            case EMBED:
                embed(now);
                release();
                break;
            case QKV:
                normed(task, vectors.x, model.part(task.layer, ATTENTION_NORM),
                       [=](int row, float sum) { publish(vectors.qkv + row, sum, now); });
                break;
            case ATTEND: {
                const int team = thread / 32 / TILES, warp = thread / 32 % TILES, lane = thread % 32;
                const Attention attention = {model, memory.turns[lane], memory.attention, vectors.qkv, vectors.partials,
                                             line.tokens, eps, team, warp, lane};
                if (attends++ % TEAMS == team) {
                    attend(attention, task, slot(), now);
                    fence_async_proxy(); // the slot has been written to
                }
                release();
                break;
            }
            case MERGE:
                merge(memory.merges[count % 2], task, line.token_groups, vectors.partials, vectors.mixed, now, thread);
                release();
                count++;
                break;
            case OUTPUT: added<HeadRows, 8>(task, vectors.mixed, vectors.x, vectors.h, now, now); break;
            case GLU: glu(task, model.part(task.layer, FFN_NORM), now); break;
            case DOWN: added<FfnRows, PER_GATE>(task, vectors.a, vectors.h, vectors.x, now, now + 1); break;
            case HEAD:
                normed(task, vectors.x, model.weights + model.norm, [=](int row, float sum) { logits[row] = (T)sum; });
                break;
            default: return;
            }
        }
    }

    /* Step 1. */
    __device__ __forceinline__ void embed(unsigned now) {
        const T *row = model.weights + token * S::HIDDEN;
        const bool there = token >= 0 && token < line.vocab;
        for (int i = thread; i < S::HIDDEN; i += THREADS)
            publish(vectors.x + Spread<8>::place(i), there ? (float)row[i] : __int_as_float(0x7fffffff), now);
    }

    /* The rows in the slot times x: each warp's part of the sums, laid down. valid(r): whether there is a row r. */
    template <class R, class Valid> __device__ __forceinline__ void multiply(const Part<R> &x, Valid valid) {
        const uint4 *words = reinterpret_cast<const uint4 *>(slot());
        const int team = thread / R::TEAM, mine = thread % R::TEAM, lane = thread % 32;
        float sums[R::PER_TEAM] = {};
#pragma unroll
        for (int i = 0; i < R::PER_TEAM; i++) {
            int row = team + i * R::TEAMS;
            if (!valid(row)) row = 0; // whatever comes of it: without a branch all words are asked for at once
#pragma unroll
            for (int k = 0; k < R::WORDS; k++) {
                float w[8];
                widen(words[row * R::ROW_WORDS + R::word(k, thread)], w, T());
#pragma unroll
                for (int j = 0; j < 8; j++) sums[i] += w[j] * x.at[k][j]; // x is 0 where the row has ended
            }
        }
        const float sum = warp_sums(sums, lane);
        constexpr int EACH = 32 / R::PER_TEAM; // lanes with the same row's sum
        if (lane % EACH == 0) memory.partial[count % 2][team + lane / EACH * R::TEAMS][mine / 32] = sum;
    }
    template <class R> __device__ __forceinline__ float sum(unsigned of, int row) const {
        float total = 0;
#pragma unroll
        for (int w = 0; w < R::TEAM / 32; w++) total += memory.partial[of % 2][row][w];
        return total;
    }
    /* All sums of a task are laid down. Whether this warp is the one to make results of them: each in its turn. */
    __device__ __forceinline__ bool summed() {
        const int turn = count++ % MULTIPLIERS;
        release();
        sync_multipliers();
        return thread / 32 == turn;
    }
    /* 1 / √(mean of squares + eps) */
    __device__ __forceinline__ float scale() const {
        float total = 0;
#pragma unroll
        for (int w = 0; w < HiddenRows::TEAM / 32; w++) total += memory.squares[norms % 2][w];
        return rsqrtf(total / S::HIDDEN + eps);
    }
    __device__ __forceinline__ void load_normed(Part<HiddenRows> &x, const Dated *from, const T *weight, unsigned now) {
        uint4 norm[HiddenRows::WORDS];
#pragma unroll
        for (int k = 0; k < HiddenRows::WORDS; k++)
            norm[k] = __ldg(reinterpret_cast<const uint4 *>(weight) + HiddenRows::word(k, thread));
        x.template load<8>(from, now, thread);
        x.norm(norm, memory.squares[++norms % 2], thread);
    }

    /* Steps 2 and 9: all tasks that stand here with the same x. */
    template <class Store>
    __device__ __forceinline__ void normed(Task first, const Dated *from, const T *weight, Store store) {
        Part<HiddenRows> x;
        load_normed(x, from, weight, date(first.layer));
        for (Task task = first; task.like(first); task = wait_task()) {
            multiply(x, [=](int r) { return r < task.count; });
            const unsigned mine = count;
            if (summed())
                for (int r = thread % 32; r < task.count; r += 32)
                    store(task.number * HiddenRows::ROWS + r, sum<HiddenRows>(mine, r) * scale());
        }
    }
    /* Steps 6 and 8. */
    template <class R, int EACH>
    __device__ __forceinline__ void added(Task first, const Dated *from, const Dated *residual, Dated *to, unsigned now,
                                          unsigned then) {
        Part<R> x;
        x.template load<EACH>(from, now, thread);
        for (Task task = first; task.like(first); task = wait_task()) {
            const int row = task.number * R::ROWS + min(thread % 32, task.count - 1);
            Dated seen = 0;
            if (thread / 32 == count % MULTIPLIERS) // whose turn it will be; the number has been there for long
                seen = look(residual + Spread<8>::place(row));
            multiply(x, [=](int r) { return r < task.count; });
            const unsigned mine = count;
            if (summed())
                for (int r = thread % 32; r < task.count; r += 32) {
                    const int place = Spread<8>::place(task.number * R::ROWS + r);
                    const float before = wait_for(residual + place, now, r < 32 ? seen : look(residual + place));
                    publish(to + place, before + sum<R>(mine, r), then);
                }
        }
    }
    /* Step 7: gates in the first half of a slot, their partners in the second. */
    __device__ __forceinline__ void glu(Task first, const T *weight, unsigned now) {
        Part<HiddenRows> x;
        load_normed(x, vectors.h, weight, now);
        for (Task task = first; task.like(first); task = wait_task()) {
            multiply(x, [=](int r) { return r % HALF < task.count; });
            const unsigned mine = count;
            if (summed()) {
                const int r = thread % 32, to = task.number * HALF + r; // at most 32 gates
                const float root = scale(), gate = r < task.count ? sum<HiddenRows>(mine, r) * root : 0;
                const float a = r < task.count ? silu(gate) * sum<HiddenRows>(mine, r + HALF) * root : 0;
                const float next = __shfl_down_sync(~0u, a, 1);
                if (r < task.count && (PER_GATE == 8 || r % 2 == 0)) {
                    if constexpr (PER_GATE == 8) publish(vectors.a + Spread<8>::place(to), a, now);
                    else publish(vectors.a + Spread<4>::place(to / 2), pack(a, next, T()), now);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
one_launch(const T *weights, const long long *places, const double *turns, const long long *token, const int *kv_len,
           T *keys, T *values, T *logits, Dated *vectors, unsigned *state, int n_layers, int vocab, int capacity,
           long long norm_at, long long head_at, float eps) {
    extern __shared__ __align__(128) unsigned char shared[];
    static_assert(sizeof(Memory) <= MEMORY, "as one_launch.py reckons");
    Memory &memory = *reinterpret_cast<Memory *>(shared + S::SLOTS * SLOT);
    const int thread = threadIdx.x, tokens = *kv_len - 1;
    if (tokens < 0 || tokens >= capacity) return;
    const unsigned launches = *reinterpret_cast<volatile unsigned *>(state + 1);
    if (thread == 0) memory.taken.ring.init(1, MULTIPLIERS);
    if (thread < 32) memory.turns[thread] = Turns(turns, tokens, thread);
    __syncthreads(); // behind it nobody needs the number of launches any more

    const Model model = {weights, keys, values, places, norm_at, head_at};
    const Line line = {n_layers, tokens / TOKENS + 1, tokens, vocab};
    if (thread < THREADS) {
        const unsigned date = launches * (n_layers + 1) + 1; // of layer 0
        Worker worker = {model, line, logits, reinterpret_cast<T *>(shared),
                         Vectors(vectors), memory, date, eps, thread, *token};
        worker.run();
        return;
    }
    Loader loader = {model, line, memory.taken, shared_address(shared), state, thread % 32};
    loader.run();
    // The last block leaves the state as the next launch needs it: nobody takes tickets any more
    if (thread == THREADS && add_acquire_release(state + 2, 1) == gridDim.x - 1) {
        state[0] = state[2] = 0;
        state[1] = launches + 1;
    }
}
