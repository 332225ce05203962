/* The warps that multiply: a vector's words in registers, one task's rows after another from slots, and what each warp
   finds of their sums laid down for those who finish (token_finish.cuh). They wait for vectors and for nothing else, so
   that they are ready for the next rows as soon as these are there. */
#pragma once
#include "../device/mma.cuh"
#include "../device/reduce.cuh"
#include "../llm/dated.cuh"
#include "token_line.cuh"

/* Sums on their way to those who finish, a buffer for each: of every row, those of each warp's lanes by fours. */
struct Sums {
    static constexpr int ROWS = most(HiddenRows::ROWS, InnerRows::ROWS), ENTRIES = 8 * S::WARPS;
    Ring<FINISHERS> ring;
    float at[FINISHERS][ROWS][ENTRIES];
};

struct Memory {
    Taken taken;
    Announced announced;
    Sums sums;
    float squares[2][S::WARPS]; // by turns, so that one may be read meanwhile
};

/* What a thread holds of a vector that is multiplied with rows: words of 8 numbers, in T. */
template <class R> struct Part {
    unsigned at[R::WORDS][4];

    /* vector · weight / √(mean of squares + eps), as soon as it is there. EACH: dated numbers of a word; 4 are two of
       16 bits each. By all threads that multiply. */
    template <int EACH>
    __device__ __forceinline__ void load(const Dated *from, unsigned date, const T *weight, float eps,
                                         float (&squares)[S::WARPS], int thread) {
        uint4 norm[R::WORDS];
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
            norm[k] = __ldg(reinterpret_cast<const uint4 *>(weight) + R::word(k, thread));
        // First for one of the warp's numbers alone, by one lane: all at once would be much to ask for again and again.
        // The last one: then all are there, mostly, and come at once; the first one: all have been asked for by then
        if (thread % 32 == 0) {
            const int last = R::word(R::WORDS - 1, thread | 31) * EACH + EACH - 1;
            const int first = R::word(R::WORDS - 1, thread) * EACH;
            wait_for(from + Spread<EACH>::place(S::LOOK_EARLY ? first : last), date);
        }
        __syncwarp();
        unsigned bits[R::WORDS][EACH];
        wait_for_words(bits, from, date, [&](int k) { return R::word(k, thread); });
        float all[R::WORDS][8], sum = 0;
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float v;
                if constexpr (EACH == 8) v = __uint_as_float(bits[k][i]);
                else {
                    const float2 two = unpack(bits[k][i / 2], T());
                    v = i % 2 ? two.y : two.x;
                }
                all[k][i] = R::has_word(k, thread) ? v : 0;
                sum += all[k][i] * all[k][i];
            }
        sum = warp_sum(sum);
        if (thread % 32 == 0) squares[thread / 32] = sum;
        asm volatile("bar.sync 1, %0;" ::"n"(S::THREADS) : "memory");
        float total = 0;
#pragma unroll
        for (int w = 0; w < S::WARPS; w++) total += squares[w];
        const float root = rsqrtf(total / R::COLS + eps);
#pragma unroll
        for (int k = 0; k < R::WORDS; k++) {
            float by[8];
            widen(norm[k], by, T());
#pragma unroll
            for (int i = 0; i < 4; i++)
                at[k][i] = pack(all[k][2 * i] * root * by[2 * i], all[k][2 * i + 1] * root * by[2 * i + 1], T());
        }
    }
};

struct Multiplier {
    Model model;
    const unsigned char *slots;
    Dated *x, *mixed; // residual stream (Spread<8>), y · silu(z) in pairs (Spread<4>)
    Memory &memory;
    unsigned first_date;
    int vocab;
    float eps;
    int thread;
    long long token;
    Phase<S::SLOTS> phase;
    Phase<FINISHERS> to;
    unsigned norms = 0;

    __device__ __forceinline__ Task wait_task() const {
        memory.taken.ring.wait_full(phase);
        return memory.taken.tasks[phase.stage];
    }
    /* This warp has laid down its sums, and needs task and slot no more. */
    __device__ __forceinline__ void done() {
        release_by_warp(memory.taken.ring, phase, thread);
        if (thread % 32 == 0) memory.sums.ring.full[to.stage].arrive();
        to.advance();
    }

    __device__ __forceinline__ void run() {
        for (Task task = wait_task(); task.kind != END;) {
            const unsigned now = first_date + task.layer;
            if (task.kind == EMBED) {
                embed(now);
                done();
                task = wait_task();
            } else if (task.kind == OUT) {
                const T *weight = model.part(task.layer, GATED_NORM);
                task = multiply_all<InnerRows, 4>(task, mixed, weight, now);
            } else {
                const T *weight = task.kind == HEAD ? model.weights + model.norm : model.part(task.layer, NORM);
                task = multiply_all<HiddenRows, 8>(task, x, weight, now);
            }
        }
    }

    __device__ __forceinline__ void embed(unsigned now) {
        const T *row = model.weights + token * S::HIDDEN;
        const bool there = token >= 0 && token < vocab;
        for (int i = thread; i < S::HIDDEN; i += S::THREADS)
            publish(x + Spread<8>::place(i), there ? (float)row[i] : __int_as_float(0x7fffffff), now);
    }

    /* All tasks that stand here with the same vector. Returns the first with another. */
    template <class R, int EACH>
    __device__ __forceinline__ Task multiply_all(Task first, const Dated *vector, const T *weight, unsigned now) {
        Part<R> by;
        if (thread == 0) memory.announced.say(true);
        by.template load<EACH>(vector, now, weight, eps, memory.squares[norms++ % 2], thread);
        if (thread == 0) memory.announced.say(false);
        Task task = first;
        do {
            multiply(by, task);
            task = wait_task();
        } while (task.like(first));
        return task;
    }

    /* By mma, as in chapter 04's rung 8: row g of A is what lanes 4g … 4g + 3 hold of one row, row g + 8 what they hold
       of the next, and column g of B what they hold of the vector. So D[g][g] and D[g + 8][g] are sums of these four
       lanes; the rest is not wanted. Of rows that there are not, whatever comes of the first. */
    template <class R> __device__ __forceinline__ void multiply(const Part<R> &by, Task task) {
        const uint4 *words = reinterpret_cast<const uint4 *>(slots + phase.stage * SLOT);
        const int lane = thread % 32;
        memory.sums.ring.wait_empty(to);
        uint4 w[R::ROWS][R::WORDS]; // all asked for at once
        if (task.count == R::ROWS) take<R>(w, words, [](int r) { return r; });
        else take<R>(w, words, [=](int r) { return r < task.count ? r : 0; });
        float sums[R::ROWS];
#pragma unroll
        for (int r = 0; r < R::ROWS; r += 2) {
            float d[4] = {};
#pragma unroll
            for (int k = 0; k < R::WORDS; k++) {
                const uint4 a = w[r][k], b = w[r + 1][k];
                mma_m16n8k16(d, {a.x, b.x, a.y, b.y}, by.at[k][0], by.at[k][1], T());
                mma_m16n8k16(d, {a.z, b.z, a.w, b.w}, by.at[k][2], by.at[k][3], T());
            }
            const bool odd = lane / 4 % 2;
            sums[r] = odd ? d[1] : d[0], sums[r + 1] = odd ? d[3] : d[2];
        }
        if (lane % 4 == lane / 8)
#pragma unroll
            for (int r = 0; r < R::ROWS; r++) memory.sums.at[to.stage][r][thread / 4] = sums[r];
        // Behind these stores, which need all words: a copy may see an arrival before loads ahead of it are answered
        done();
    }
    template <class R, class Row>
    __device__ __forceinline__ void take(uint4 (&w)[R::ROWS][R::WORDS], const uint4 *words, Row row) const {
#pragma unroll
        for (int r = 0; r < R::ROWS; r++)
#pragma unroll
            for (int k = 0; k < R::WORDS; k++) w[r][k] = words[row(r) * R::ROW_WORDS + R::word(k, thread)];
    }
};
