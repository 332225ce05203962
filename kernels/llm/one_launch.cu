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
#include "token_products.cuh"

/* Parts of the sums of a task's rows lie by turns here and there, so that one may be read meanwhile: each is written
   again behind the barrier of the other, so only tasks with a barrier are counted for it. */
struct Memory {
    Taken taken;
    AttentionMemory attention;
    MergeMemory merges[2];
    alignas(16) float partial[2][THREADS];
    float squares[MULTIPLIERS];
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
    unsigned count = 0, attends = 0; // tasks with a barrier, tasks of attention

    __device__ __forceinline__ unsigned date(int layer) const { return first_date + layer; }
    /* The next task, when what it reads of weights or tokens is there. */
    __device__ __forceinline__ Task wait_task() const {
        memory.taken.ring.wait_full(phase);
        return memory.taken.tasks[phase.stage];
    }
    __device__ __forceinline__ T *slot() const { return slots_memory + phase.stage * (SLOT / 2); }
    /* This warp needs task and slot no more. */
    __device__ __forceinline__ void release() { release_by_warp(memory.taken.ring, phase, thread); }

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
            case OUTPUT: output(task, now); break;
            case GLU: glu(task, model.part(task.layer, FFN_NORM), now); break;
            case DOWN: down(task, now); break;
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

    /* All sums of a task are laid down. Whether this warp is the one to make results of them: each in its turn. */
    __device__ __forceinline__ bool summed() {
        const int turn = count++ % MULTIPLIERS;
        sync_multipliers();
        return thread / 32 == turn;
    }
    /* x · weight / √(mean of x² + eps) */
    __device__ __forceinline__ void load_normed(Part<HiddenRows> &x, const Dated *from, const T *weight, unsigned now) {
        uint4 norm[HiddenRows::WORDS];
#pragma unroll
        for (int k = 0; k < HiddenRows::WORDS; k++)
            norm[k] = __ldg(reinterpret_cast<const uint4 *>(weight) + HiddenRows::word(k, thread));
        x.load_floats(from, now, thread, [&](float(&at)[HiddenRows::WORDS][8]) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < HiddenRows::WORDS; k++)
#pragma unroll
                for (int i = 0; i < 8; i++) sum += at[k][i] * at[k][i];
            sum = warp_sum(sum);
            if (thread % 32 == 0) memory.squares[thread / 32] = sum;
            sync_multipliers(); // what is read here is written again behind the barriers of tasks
            float total = 0;
#pragma unroll
            for (int w = 0; w < HiddenRows::TEAM / 32; w++) total += memory.squares[w];
            const float root = rsqrtf(total / S::HIDDEN + eps);
#pragma unroll
            for (int k = 0; k < HiddenRows::WORDS; k++) {
                float w[8];
                widen(norm[k], w, T());
#pragma unroll
                for (int i = 0; i < 8; i++) at[k][i] *= w[i] * root;
            }
        });
    }

    /* All tasks that stand here with the same x: load() brings it, valid(task, r) says whether there is a row r, and
       done(task, sums) is for the warp that makes results of them. */
    template <class R, class Load, class Look, class Valid, class Done>
    __device__ __forceinline__ void stage(const Task first, Load load, Look look_up, Valid valid, Done done) {
        Part<R> x;
        load(x);
        for (Task task = first;;) {
            Words<R> w;
            take<R>(w, slot(), thread, [=](int r) { return valid(task, r); });
            const Dated seen = thread / 32 == count % MULTIPLIERS ? look_up(task) : 0; // whose turn it will be
            const float *laid_down = multiply<R>(x, w, memory.partial[count % 2], thread);
            release();
            if (summed()) done(task, add_up<R>(laid_down, thread % 32), seen);
            task = wait_task();
            if (!task.like(first)) return;
        }
    }
    /* Steps 2 and 9. */
    template <class Store>
    __device__ __forceinline__ void normed(Task first, const Dated *from, const T *weight, Store store) {
        stage<HiddenRows>(
            first, [&](auto &x) { load_normed(x, from, weight, date(first.layer)); }, [](Task) { return Dated(0); },
            [](Task task, int r) { return r < task.count; },
            [&](Task task, Sums<HiddenRows> sums, Dated) {
#pragma unroll
                for (int n = 0; n < Sums<HiddenRows>::SIZE; n++) {
                    const int r = thread % 32 + 32 * n;
                    if (r < task.count) store(task.number * HiddenRows::ROWS + r, sums.at[n]);
                }
            });
    }
    /* Steps 6 and 8. */
    template <class R, class Load>
    __device__ __forceinline__ void added(Task first, Load load, const Dated *residual, Dated *to, unsigned now,
                                          unsigned then) {
        stage<R>(
            first, load,
            [=](Task task) { // it has been there for long
                return look(residual + Spread<8>::place(task.number * R::ROWS + min(thread % 32, task.count - 1)));
            },
            [](Task task, int r) { return r < task.count; },
            [=](Task task, Sums<R> sums, Dated seen) {
#pragma unroll
                for (int n = 0; n < Sums<R>::SIZE; n++) {
                    const int r = thread % 32 + 32 * n, place = Spread<8>::place(task.number * R::ROWS + r);
                    if (r >= task.count) break;
                    const float before = wait_for(residual + place, now, n == 0 ? seen : look(residual + place));
                    publish(to + place, before + sums.at[n], then);
                }
            });
    }
    __device__ __forceinline__ void output(Task task, unsigned now) {
        const auto load = [&](auto &x) {
            if (line.merged()) x.load_pairs(vectors.mixed, now, thread);
            else x.load_merged(vectors.partials, line.token_groups, now, thread);
        };
        added<HeadRows>(task, load, vectors.x, vectors.h, now, now);
    }
    __device__ __forceinline__ void down(Task task, unsigned now) {
        const auto load = [&](auto &x) {
            if constexpr (PER_GATE == 4) x.load_pairs(vectors.a, now, thread);
            else x.load_floats(vectors.a, now, thread, [](auto &) {});
        };
        added<FfnRows>(task, load, vectors.h, vectors.x, now, now + 1);
    }
    /* Step 7: gates in the first half of a slot, their partners in the second. */
    __device__ __forceinline__ void glu(Task first, const T *weight, unsigned now) {
        stage<HiddenRows>(
            first, [&](auto &x) { load_normed(x, vectors.h, weight, now); }, [](Task) { return Dated(0); },
            [](Task task, int r) { return r % HALF < task.count; },
            [&](Task task, Sums<HiddenRows> sums, Dated) {
                const int r = thread % 32, to = task.number * HALF + r;
                const float a = silu(sums.at[0]) * sum_of<HALF>(sums, r), next = __shfl_down_sync(~0u, a, 1);
                if (r < task.count && (PER_GATE == 8 || r % 2 == 0)) {
                    if constexpr (PER_GATE == 8) publish(vectors.a + Spread<8>::place(to), a, now);
                    else publish(vectors.a + Spread<4>::place(to / 2), pack(a, next, T()), now);
                }
            });
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
    __syncthreads(); // behind it nobody needs the number of launches any more

    const Model model = {weights, keys, values, places, norm_at, head_at};
    const Line line = {n_layers, tokens / TOKENS + 1, tokens, vocab};
    if (thread < THREADS) {
        const unsigned date = launches * (n_layers + 1) + 1; // of layer 0
        Worker worker = {model, line, logits, reinterpret_cast<T *>(shared),
                         Vectors(vectors), memory, date, eps, thread, *token};
        if (thread < 32) memory.turns[thread] = Turns(turns, tokens, thread); // while the first weights come
        sync_multipliers();
        worker.run();
        return;
    }
    Loader loader = {model, line, memory.taken, shared_address(shared), state, thread % 32};
    put_by_tickets(loader);
    // The last block leaves the state as the next launch needs it: nobody takes tickets any more
    if (thread == THREADS && add_acquire_release(state + 2, 1) == gridDim.x - 1) {
        state[0] = state[2] = 0;
        state[1] = launches + 1;
    }
}
