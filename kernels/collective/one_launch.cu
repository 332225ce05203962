/* A whole token over several devices in one launch on each: llm/one_launch.cu of a device's share, whose heads, columns
   of the feed-forward block and rows of the head it has (SIZES and SHAPE are those of the share).

   What is new: a row of W_o or W_down is a sum over devices. The warp that has this device's part of it sends it to all
   others as a dated number, and goes on; the parts that it waits for have come when its turn is there again, or, behind
   the last task, when the stage ends. So a stage waits for the link once, whatever tasks a block has of it. Who has all
   parts adds them up in the order of ranks, so that all devices go on with the same bits.

   mail       [site][rank of who writes][HIDDEN] dated numbers on each device, 0 before the first launch; mails: all
   failed     (1,): whether a launch before this one gave up; told: what the host is told then
   embedding_rows   of the whole vocabulary: `vocab` and logits are those of the share

   A box is free when it is written again: who writes there has, through sums of the other site, what the reader made of
   its last number. A task waits for the task of its number on other devices, and for those in front of it, so that the
   first unfinished one of all devices waits for none. Over the link go 8 * (devices - 1) * HIDDEN bytes a site and
   layer from each device. Launch on all devices, as many times on each, as one_launch. */
#ifndef DEVICES
#define DEVICES 2
#endif
#include "../llm/one_launch.cu"

struct Peers { Dated *of[DEVICES]; };
struct Told { int *at; }; // in the host's memory
enum Site { OF_OUTPUT, OF_DOWN };

/* The way to the other devices. */
struct Link {
    Dated *mail;
    Peers mails;
    Told told;
    int *failed_before;   // of this device, for the launches behind this one
    volatile int *failed; // of the block: nobody waits any more
    int rank, limit;

    __device__ __forceinline__ static int place(Site site, int from, int row) {
        return (site * DEVICES + from) * S::HIDDEN + row;
    }
    __device__ __forceinline__ void send(Site site, int row, float part, unsigned date) const {
        const Dated word = (Dated)date << 32 | __float_as_uint(part);
#pragma unroll
        for (int r = 0; r < DEVICES; r++)
            if (r != rank)
                asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(mails.of[r] + place(site, rank, row)),
                             "l"(word) : "memory");
    }
    /* One device's part; NaN where it does not come. */
    __device__ __forceinline__ float receive(Site site, int from, int row, unsigned date) const {
        const Dated *at = mail + place(site, from, row);
        for (int looks = 0; looks < limit && !*failed; looks++) {
            Dated seen;
            asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
            if (has(seen, date)) return value_of(seen);
        }
        if (!*failed) {
            *failed = 1;
            asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(failed_before) : "memory");
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(told.at), "r"(from + 1) : "memory");
        }
        return __int_as_float(0x7fffffff);
    }
    __device__ __forceinline__ float sum(Site site, int row, float own, unsigned date) const {
        float total = 0;
#pragma unroll
        for (int r = 0; r < DEVICES; r++) {
            const float part = r == rank ? own : receive(site, r, row, date);
            total = r ? total + part : part;
        }
        return total;
    }
};

/* The warps that multiply, of a share. */
struct Share : Worker {
    Link link;
    long long embedding_rows;

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
        const bool there = token >= 0 && token < embedding_rows;
        for (int i = thread; i < S::HIDDEN; i += THREADS)
            publish(vectors.x + Spread<8>::place(i), there ? (float)row[i] : __int_as_float(0x7fffffff), now);
    }
    /* Steps 6 and 8. Of the rows that a thread has sent, the last one is pending. */
    template <Site SITE, class R, class Load>
    __device__ __forceinline__ void summed_up(Task first, Load load, const Dated *residual, Dated *to, unsigned now,
                                              unsigned then) {
        int pending = -1; // the row, of which this is
        float own;
        const auto finish = [&] {
            if (pending >= 0) {
                const int place = Spread<8>::place(pending);
                const Dated seen = look(residual + place); // it has been there for long
                const float total = link.sum(SITE, pending, own, now);
                publish(to + place, wait_for(residual + place, now, seen) + total, then);
            }
            pending = -1;
        };
        stage<R>(
            first, load,
            [](Task) { return Dated(0); },
            [](Task task, int r) { return r < task.count; },
            [&](Task task, Sums<R> sums, Dated) {
#pragma unroll
                for (int n = 0; n < Sums<R>::SIZE; n++) {
                    const int r = thread % 32 + 32 * n, row = task.number * R::ROWS + r;
                    if (r >= task.count) break;
                    link.send(SITE, row, sums.at[n], now);
                    finish();
                    own = sums.at[n], pending = row;
                }
            });
        finish();
    }
    __device__ __forceinline__ void output(Task task, unsigned now) {
        const auto load = [&](auto &x) {
            if (line.merged()) x.load_pairs(vectors.mixed, now, thread);
            else x.load_merged(vectors.partials, line.token_groups, now, thread);
        };
        summed_up<OF_OUTPUT, HeadRows>(task, load, vectors.x, vectors.h, now, now);
    }
    __device__ __forceinline__ void down(Task task, unsigned now) {
        const auto load = [&](auto &x) {
            if constexpr (PER_GATE == 4) x.load_pairs(vectors.a, now, thread);
            else x.load_floats(vectors.a, now, thread, [](auto &) {});
        };
        summed_up<OF_DOWN, FfnRows>(task, load, vectors.h, vectors.x, now, now + 1);
    }
};

struct ShareMemory {
    Memory of_worker;
    int failed;
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
one_launch_share(const T *weights, const long long *places, const double *turns, const long long *token,
                 const int *kv_len, T *keys, T *values, T *logits, Dated *vectors, unsigned *state, int n_layers,
                 int vocab, int capacity, long long norm_at, long long head_at, float eps, Dated *mail, Peers mails,
                 int *failed, Told told, int rank, int limit, long long embedding_rows) {
    extern __shared__ __align__(128) unsigned char shared[];
    static_assert(sizeof(ShareMemory) <= MEMORY, "as llm/one_launch.py reckons");
    ShareMemory &memory = *reinterpret_cast<ShareMemory *>(shared + S::SLOTS * SLOT);
    Taken &taken = memory.of_worker.taken;
    const int thread = threadIdx.x, tokens = *kv_len - 1;
    if (tokens < 0 || tokens >= capacity) return;
    const unsigned launches = *reinterpret_cast<volatile unsigned *>(state + 1);
    if (thread == 0) taken.ring.init(1, MULTIPLIERS), memory.failed = *reinterpret_cast<volatile int *>(failed);
    __syncthreads(); // behind it nobody needs the number of launches any more

    const Model model = {weights, keys, values, places, norm_at, head_at};
    const Line line = {n_layers, tokens / TOKENS + 1, tokens, vocab};
    if (thread < THREADS) {
        const unsigned date = launches * (n_layers + 1) + 1; // of layer 0
        const Worker worker = {model, line, logits, reinterpret_cast<T *>(shared),
                               Vectors(vectors), memory.of_worker, date, eps, thread, *token};
        if (thread < 32) memory.of_worker.turns[thread] = Turns(turns, tokens, thread); // while the first weights come
        sync_multipliers();
        Share share = {worker, {mail, mails, told, failed, &memory.failed, rank, limit}, embedding_rows};
        share.run();
        return;
    }
    Loader loader = {model, line, taken, shared_address(shared), state, thread % 32};
    put_by_tickets(loader);
    // The last block leaves the state as the next launch needs it: nobody takes tickets any more
    if (thread == THREADS && add_acquire_release(state + 2, 1) == gridDim.x - 1) {
        state[0] = state[2] = 0;
        state[1] = launches + 1;
    }
}
