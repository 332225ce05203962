/* A whole token of Mamba-2 in one launch.

   weights    the embedding (vocab, hidden); where all other matrices and norms lie, counted from there, `places` says
              (token_line.cuh), norm_at and head_at
   constants  (n_layers, CONSTANTS): the convolution's weight and bias, dt_bias, A and D of each layer
   windows    (n_layers, WIDTH - 1, CHANNELS): the convolution's inputs, the oldest first, written in place
   states     (n_layers, HEADS, HEADDIM, DSTATE), written in place
   token      (1,); outside of the vocabulary: NaN
   logits     (vocab,)
   vectors    dated numbers, 0 before the first launch (Worker says which)
   turn       [0]: tickets taken, 0 between launches; [1]: launches so far; [2]: blocks that are done, 0 between them

   As chapter 17's one launch: one line of tasks that blocks take by tickets (token_line.cuh), slots that are filled
   long before a task can begin, and vectors whose numbers tell themselves that they are there (llm/dated.cuh). Three
   vectors a layer are handed on: what in_proj gives, what the states give, and the residual stream. While blocks wait
   for one, their slots fill with what they will multiply: memory rests only where a wait is longer than that.

   A layer: in_proj and the convolution's step, channel by channel; the states, some rows of a head at a time, which
   came into a slot too; out_proj, with the gated norm's root taken last, added to the residual stream, in float.

   Moves the weights once, and the states twice. Compile with SIZES (token_line.cuh). Launch with S::THREADS + 32
   threads on any number of blocks, best one for each multiprocessor, and S::SLOTS * SLOT + sizeof(Memory) bytes. */
#include "../device/grid.cuh"
#include "../device/math.cuh"
#include "../device/reduce.cuh"
#include "../llm/dated.cuh"
#include "token_line.cuh"

struct Memory {
    Taken taken;
    float partial[2][8][S::WARPS + 1]; // of each row, one of each warp; by turns, so that one may be read meanwhile
    float squares[2][S::WARPS];
};

/* What a thread holds of a vector that is multiplied with rows. */
template <class R> struct Part {
    float at[R::WORDS][8];

    /* EACH: dated numbers of a word; 4 are two of 16 bits each. Multiplies with a norm's weight, and leaves the warp's
       sum of squares from before. */
    template <int EACH>
    __device__ __forceinline__ void load(const Dated *from, unsigned date, const T *weight, float *squares, /* of
        the warps */ int thread) {
        uint4 norm[R::WORDS];
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
            norm[k] = __ldg(reinterpret_cast<const uint4 *>(weight) + R::word(k, thread));
        // First for the warp's last number alone, by one lane: all at once would be much to ask for again and again
        if (thread % 32 == 0)
            wait_for(from + Spread<EACH>::place(R::word(R::WORDS - 1, thread | 31) * EACH + EACH - 1), date);
        __syncwarp();
        unsigned bits[R::WORDS][EACH];
        wait_for_words(bits, from, date, [&](int k) { return R::word(k, thread); });
        float sum = 0;
#pragma unroll
        for (int k = 0; k < R::WORDS; k++) {
            float by[8];
            widen(norm[k], by, T());
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float v;
                if constexpr (EACH == 8) v = __uint_as_float(bits[k][i]);
                else {
                    const float2 two = unpack(bits[k][i / 2], T());
                    v = i % 2 ? two.y : two.x;
                }
                if (!R::has_word(k, thread)) v = 0;
                sum += v * v;
                at[k][i] = v * by[i];
            }
        }
        sum = warp_sum(sum);
        if (thread % 32 == 0) squares[thread / 32] = sum;
    }
};

/* The warps that multiply. */
struct Worker {
    Model model;
    T *logits;
    const unsigned char *slots;
    Dated *x, *mixed, *projected; // residual stream (Spread<8>), y · silu(z) in pairs (Spread<4>), what in_proj gives
    Memory &memory;
    unsigned first_date;
    float eps, lowest, highest;
    int thread, vocab;
    long long token;
    Phase<S::SLOTS> phase;
    unsigned count = 0, norms = 0; // tasks with a barrier, vectors normed

    __device__ __forceinline__ Task wait_task() const {
        memory.taken.ring.wait_full(phase);
        return memory.taken.tasks[phase.stage];
    }
    __device__ __forceinline__ const unsigned char *slot() const { return slots + phase.stage * SLOT; }
    /* This warp needs task and slot no more. */
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (thread % 32 == 0) memory.taken.ring.release(phase);
        phase.advance();
    }

    __device__ __forceinline__ void run() {
        for (;;) {
            const Task task = wait_task();
            const unsigned now = first_date + task.layer;
            switch (task.kind) {
            case EMBED: embed(now); break;
            case IN: in(task, now); break;
            case STATE: state(task, now); break;
            case OUT: out(task, now); break;
            case HEAD: head(task, now); break;
            default: return;
            }
        }
    }

    __device__ __forceinline__ void embed(unsigned now) {
        const T *row = model.weights + token * S::HIDDEN;
        const bool there = token >= 0 && token < vocab;
        for (int i = thread; i < S::HIDDEN; i += S::THREADS)
            publish(x + Spread<8>::place(i), there ? (float)row[i] : __int_as_float(0x7fffffff), now);
        release();
    }

    /* The rows in the slot times a vector: each warp's part of the sums, laid down. Of rows that there are not,
       whatever comes of the first: without a branch all words are asked for at once. */
    template <class R> __device__ __forceinline__ void multiply(const Part<R> &by, int rows) {
        const uint4 *words = reinterpret_cast<const uint4 *>(slot());
        float sums[R::ROWS] = {};
#pragma unroll
        for (int r = 0; r < R::ROWS; r++)
#pragma unroll
            for (int k = 0; k < R::WORDS; k++) {
                float w[8];
                widen(words[(r < rows ? r : 0) * R::ROW_WORDS + R::word(k, thread)], w, T());
#pragma unroll
                for (int i = 0; i < 8; i++) sums[r] += w[i] * by.at[k][i];
            }
        const float sum = warp_sums(sums, thread % 32);
        constexpr int EACH = 32 / R::ROWS; // lanes with the same row's sum
        if (thread % EACH == 0) memory.partial[count % 2][thread % 32 / EACH][thread / 32] = sum;
    }
    __device__ __forceinline__ float sum(unsigned of, int row) const {
        float total = 0;
#pragma unroll
        for (int w = 0; w < S::WARPS; w++) total += memory.partial[of % 2][row][w];
        return total;
    }
    /* Whether this warp makes results of the next task's sums: each in its turn. */
    __device__ __forceinline__ bool my_turn() const { return thread / 32 == count % S::WARPS; }
    /* All sums of a task are laid down. */
    __device__ __forceinline__ void summed() {
        count++;
        release();
        asm volatile("bar.sync 1, %0;" ::"n"(S::THREADS) : "memory");
    }
    /* 1 / √(mean of squares + eps) */
    __device__ __forceinline__ float scale(int cols) const {
        float total = 0;
#pragma unroll
        for (int w = 0; w < S::WARPS; w++) total += memory.squares[norms % 2][w];
        return rsqrtf(total / cols + eps);
    }

    /* in_proj; a lane of the warp whose turn it is has a row, and, if it is a channel, its window. */
    __device__ __forceinline__ void in(Task first, unsigned now) {
        Part<HiddenRows> by;
        by.template load<8>(x, now, model.part(first.layer, NORM), memory.squares[++norms % 2], thread);
        for (Task task = first; task.like(first); task = wait_task()) {
            const bool mine = my_turn() && thread % 32 < task.count;
            const int row = task.number * HiddenRows::ROWS + thread % 32, c = row - S::INNER;
            const bool channel = mine && c >= 0 && c < S::CHANNELS;
            T *window = model.windows + ((long long)task.layer * (S::WIDTH - 1)) * S::CHANNELS + c;
            float before = 0, tap = 0;
            if (channel) {
                const float *weight = model.constant(task.layer, CONV_WEIGHT) + c * S::WIDTH;
                before = __ldg(model.constant(task.layer, CONV_BIAS) + c), tap = __ldg(weight + S::WIDTH - 1);
#pragma unroll
                for (int k = 0; k < S::WIDTH - 1; k++) {
                    const T past = window[k * S::CHANNELS];
                    if (k > 0) window[(k - 1) * S::CHANNELS] = past;
                    before += __ldg(weight + k) * (float)past;
                }
            }
            multiply(by, task.count);
            const unsigned of = count;
            summed();
            if (!mine) continue;
            const T value = (T)(sum(of, thread % 32) * scale(S::HIDDEN));
            if (channel) window[(S::WIDTH - 2) * S::CHANNELS] = value;
            publish(projected + row, channel ? (float)(T)silu(before + tap * (float)value) : (float)value, now);
        }
    }

    /* Some rows of a head's state, two of them a warp at a time, side by side along dstate. */
    __device__ __forceinline__ void state(Task task, unsigned now) {
        constexpr int WORDS = (S::DSTATE + 127) / 128;
        const int lane = thread % 32, head = task.number / HEAD_TASKS;
        const int at = head * S::HEADDIM + task.number % HEAD_TASKS * STATE_ROWS; // the first row's number of all
        const Dated *xs = projected + S::INNER, *z = projected, *dts = xs + S::CHANNELS;
        const Dated *B = xs + S::INNER + head / (S::HEADS / S::GROUPS) * S::DSTATE, *C = B + S::GROUPS * S::DSTATE;
        const float rate = __ldg(model.constant(task.layer, A_AT) + head), /* of the
            head */ skip = __ldg(model.constant(task.layer, D_AT) + head);
        const float bias = __ldg(model.constant(task.layer, DT_BIAS) + head);
        const float4 *from = reinterpret_cast<const float4 *>(slot());
        float4 *to = reinterpret_cast<float4 *>(model.state(task));
        for (int p = thread / 32 * 2; p < task.count; p += 2 * S::WARPS) {
            wait_for(dts + head, now); // the last of in_proj's rows: most others have come by then
            float in[5 + 8 * WORDS];
            wait_for_all(in, now, [&](int i) {
                if (i == 0) return dts + head;
                if (i < 5) return (i < 3 ? xs : z) + at + p + (i - 1) % 2;
                const int n = least(((i - 5) / 8 * 32 + lane) * 4, S::DSTATE - 4) + (i - 5) % 4;
                return ((i - 5) % 8 < 4 ? B : C) + n;
            });
            const float raw = in[0] + bias, plus = raw > 20 ? raw : log1pf(expf(raw));
            const float step = fminf(fmaxf(plus, lowest), highest), decay = expf(rate * step);
            float y[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WORDS; w++) {
                    const int word = w * 32 + lane;
                    if (word >= S::DSTATE / 4) break;
                    const float *b = in + 5 + 8 * w, *c = b + 4, add = step * in[1 + r];
                    float4 h = from[(p + r) * (S::DSTATE / 4) + word];
                    h.x = decay * h.x + add * b[0], h.y = decay * h.y + add * b[1];
                    h.z = decay * h.z + add * b[2], h.w = decay * h.w + add * b[3];
                    sum += h.x * c[0] + h.y * c[1] + h.z * c[2] + h.w * c[3];
                    to[(p + r) * (S::DSTATE / 4) + word] = h;
                }
                y[r] = (warp_sum(sum) + skip * in[1 + r]) * silu(in[3 + r]);
            }
            if (lane == 0) publish(mixed + Spread<4>::place((at + p) / 2), pack(y[0], y[1], T()), now);
        }
        release();
    }

    /* out_proj behind the gated norm, added to the residual stream. */
    __device__ __forceinline__ void out(Task first, unsigned now) {
        Part<InnerRows> by;
        by.template load<4>(mixed, now, model.part(first.layer, GATED_NORM), memory.squares[++norms % 2], thread);
        for (Task task = first; task.like(first); task = wait_task()) {
            const bool mine = my_turn() && thread % 32 < task.count;
            Dated *place = x + Spread<8>::place(task.number * InnerRows::ROWS + thread % 32);
            const float before = mine ? wait_for(place, now) : 0; // it has been there for long
            multiply(by, task.count);
            const unsigned of = count;
            summed();
            if (mine) publish(place, before + sum(of, thread % 32) * scale(S::INNER), now + 1);
        }
    }

    __device__ __forceinline__ void head(Task first, unsigned now) {
        Part<HiddenRows> by;
        by.template load<8>(x, now, model.weights + model.norm, memory.squares[++norms % 2], thread);
        for (Task task = first; task.like(first); task = wait_task()) {
            const bool mine = my_turn() && thread % 32 < task.count;
            multiply(by, task.count);
            const unsigned of = count;
            summed();
            if (mine) logits[task.number * HiddenRows::ROWS + thread % 32] = /* in 16
                bits */ (T)(sum(of, thread % 32) * scale(S::HIDDEN));
        }
    }
};

extern "C" __global__ void __launch_bounds__(S::THREADS + 32, 1)
one_launch(const T *weights, const float *constants, const long long *places, T *windows, float *states,
           const long long *token, T *logits, Dated *vectors, unsigned *turn, int n_layers, int vocab, /* all
           as above */ long long norm_at,
           long long head_at, float eps, float lowest, float highest) {
    extern __shared__ __align__(128) unsigned char shared[];
    Memory &memory = *reinterpret_cast<Memory *>(shared + S::SLOTS * SLOT);
    const int thread = threadIdx.x;
    const unsigned launches = *reinterpret_cast<volatile unsigned *>(turn + 1);
    if (thread == 0) memory.taken.ring.init(1, S::WARPS);
    __syncthreads(); // behind it nobody needs the number of launches any more

    const Model model = {weights, constants, places, windows, states, norm_at, head_at};
    const Line line = {n_layers, vocab};
    if (thread < S::THREADS) {
        const unsigned date = launches * (n_layers + 1) + 1; // of layer 0
        Dated *mixed = vectors + Spread<8>::size(S::HIDDEN);
        Worker worker = {model, logits, shared, vectors, mixed, mixed + Spread<4>::size(S::INNER), memory, date, eps,
                         lowest, highest, thread, vocab, *token};
        worker.run();
        return;
    }
    Loader loader = {model, line, memory.taken, shared_address(shared), turn, thread % 32};
    loader.run();
    // The last block leaves the state as the next launch needs it: nobody takes tickets any more
    if (thread == S::THREADS && add_acquire_release(turn + 2, 1) == gridDim.x - 1) {
        turn[0] = turn[2] = 0;
        turn[1] = launches + 1;
    }
}
