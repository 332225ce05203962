/* The warps that make results of sums: the convolution's step, the states, the residual stream, logits. A team takes
   every fourth task of its block, and knows of it as soon as its rows are in their slot: so states, windows and what
   else it needs are on their way to its registers while the product is still to come. What it must wait for itself, B,
   C and dt, it waits for beside those who multiply. */
#pragma once
#include "../device/copy.cuh"
#include "../device/math.cuh"
#include "token_multiply.cuh"

struct Finisher {
    static constexpr int WORDS = (S::DSTATE + 127) / 128; // of 4 numbers, of a row of states, a lane
    static constexpr int ROWS = HiddenRows::ROWS / PAIRS; // of a warp; row r's sum in lanes 8r … 8r + 7
    static_assert(ROWS == 4, "two channels' x, and their z");

    Model model;
    T *logits;
    Dated *x, *mixed, *shared; // residual stream (Spread<8>), y · silu(z) in pairs (Spread<4>), B, C and dt
    Memory &memory;
    unsigned first_date;
    float lowest, highest;
    int team, pair, lane;
    Phase<S::SLOTS> phase;
    unsigned parity = 0, date = 0; // of B and C below
    float B[WORDS][4], C[WORDS][4];

    __device__ __forceinline__ void run() {
        for (int i = 0; i < team; i++) phase.advance();
        for (;;) {
            memory.taken.ring.wait_full(phase);
            const Task task = memory.taken.tasks[phase.stage];
            release_by_warp(memory.taken.ring, phase, lane);
            for (int i = 1; i < TEAMS; i++) phase.advance();
            const unsigned now = first_date + task.layer;
            switch (task.kind) {
            case EMBED:
                wait_sums();
                take_sums();
                break;
            case SHARED: share(task, now); break;
            case CHANNEL: channels(task, now); break;
            case OUT: out(task, now); break;
            case HEAD: head(task); break;
            default: return;
            }
        }
    }

    __device__ __forceinline__ void wait_sums() const { memory.sums.ring.full[team].wait(parity); }
    /* This warp needs the team's sums no more. */
    __device__ __forceinline__ void take_sums() {
        __syncwarp();
        if (lane == 0) memory.sums.ring.empty[team].arrive();
        parity ^= 1;
    }
    /* The sums of rows row(0) … row(N - 1) of the task, that of the r-th in lanes 32 r / N and on. */
    template <int N, class Row> __device__ __forceinline__ float add_up(Row row) {
        float sums[N] = {};
        wait_sums();
#pragma unroll
        for (int e = lane; e < Sums::ENTRIES; e += 32)
#pragma unroll
            for (int r = 0; r < N; r++) sums[r] += memory.sums.at[team][row(r)][e];
        take_sums();
        return warp_sums(sums, lane);
    }

    /* A channel's step of the convolution, by one lane: all but the newest input. */
    struct Window {
        T *newest;
        float before, tap;

        /* channel: of CHANNELS, or below 0, if there is none. */
        __device__ __forceinline__ Window(const Model &model, int layer, int channel) {
            newest = nullptr, before = tap = 0;
            if (channel < 0) return;
            T *window = model.windows + (long long)layer * (S::WIDTH - 1) * S::CHANNELS + channel;
            const float *weight = model.constant(layer, CONV_WEIGHT) + channel * S::WIDTH;
            newest = window + (S::WIDTH - 2) * S::CHANNELS;
            before = __ldg(model.constant(layer, CONV_BIAS) + channel), tap = __ldg(weight + S::WIDTH - 1);
#pragma unroll
            for (int k = 0; k < S::WIDTH - 1; k++) {
                const T past = window[k * S::CHANNELS];
                if (k > 0) window[(k - 1) * S::CHANNELS] = past;
                before += __ldg(weight + k) * (float)past;
            }
        }
        /* The channel behind silu; what is no channel stays. */
        __device__ __forceinline__ float step(float sum) const {
            const T value = (T)sum;
            if (!newest) return (float)value;
            *newest = value;
            return (float)(T)silu(before + tap * (float)value);
        }
    };

    /* Rows of B, C and dt. */
    __device__ __forceinline__ void share(Task task, unsigned now) {
        const int r = ROWS * pair + lane / 8, row = task.number * HiddenRows::ROWS + r;
        const bool mine = lane % 8 == 0 && r < task.count;
        Window window(model, task.layer, mine && row < 2 * S::DSTATE ? S::INNER + row : -1);
        const float sum = add_up<ROWS>([&](int i) { return ROWS * pair + i; });
        if (mine) publish(shared + row, window.step(sum), now);
    }

    /* B and C, kept for all heads of the layer: words lane, lane + 32, … of 4 numbers. */
    __device__ __forceinline__ void wait_rows(unsigned now) {
        date = now;
        unsigned b[WORDS][4], c[WORDS][4];
        bool all;
        do {
            all = true;
#pragma unroll
            for (int w = 0; w < WORDS; w++)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const Dated *at = shared + least((w * 32 + lane) * 4, S::DSTATE - 4) + i;
                    all &= look(b[w][i], b[w][i + 1], at, now);
                    all &= look(c[w][i], c[w][i + 1], at + S::DSTATE, now);
                }
        } while (!all);
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll
            for (int i = 0; i < 4; i++) B[w][i] = __uint_as_float(b[w][i]), C[w][i] = __uint_as_float(c[w][i]);
    }

    /* Two channels of a head: x and z come as sums; h = exp(A dt) h + dt x Bᵀ, y = C h + D x, and y · silu(z). */
    __device__ __forceinline__ void channels(Task task, unsigned now) {
        if (2 * pair >= task.count) { // there are no such
            wait_sums();
            take_sums();
            return;
        }
        const int head = task.number / HEAD_TASKS, at = first_channel(task) + 2 * pair;
        uint4 *states = reinterpret_cast<uint4 *>(model.state(task.layer, at));
        uint4 h[2][WORDS];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                h[r][w] = load_streaming(states + r * (S::DSTATE / 4) + least(w * 32 + lane, S::DSTATE / 4 - 1));
        const Dated *dt = shared + 2 * S::DSTATE + head;
        const Dated seen = look(dt);
        const float rate = __ldg(model.constant(task.layer, A_AT) + head),
                    skip = __ldg(model.constant(task.layer, D_AT) + head),
                    bias = __ldg(model.constant(task.layer, DT_BIAS) + head);
        Window window(model, task.layer, lane % 8 == 0 && lane < 16 ? at + lane / 8 : -1);
        const float found = window.step(add_up<ROWS>([&](int i) { return i / 2 * HALF + 2 * pair + i % 2; }));

        if (date != now) wait_rows(now);
        const float raw = wait_for(dt, now, seen) + bias, plus = raw > 20 ? raw : log1pf(expf(raw));
        const float step = fminf(fmaxf(plus, lowest), highest), decay = expf(rate * step);
        float y[2], in[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            in[r] = __shfl_sync(~0u, found, 8 * r), y[r] = 0;
            const float add = step * in[r];
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (w * 32 + lane >= S::DSTATE / 4) break;
                const unsigned old[4] = {h[r][w].x, h[r][w].y, h[r][w].z, h[r][w].w};
                float moved[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    moved[i] = decay * __uint_as_float(old[i]) + add * B[w][i];
                    y[r] += moved[i] * C[w][i];
                }
                __stcs(reinterpret_cast<float4 *>(states) + r * (S::DSTATE / 4) + w * 32 + lane,
                       float4{moved[0], moved[1], moved[2], moved[3]});
            }
        }
        const float sum = warp_sums(y, lane); // of the first channel in lanes 0 … 15
        const float gated = (sum + skip * (lane < 16 ? in[0] : in[1])) * silu(__shfl_sync(~0u, found, 16 + lane / 16 * 8));
        const float next = __shfl_sync(~0u, gated, 16);
        if (lane == 0) publish(mixed + Spread<4>::place(at / 2), pack(gated, next, T()), now);
    }

    /* Rows of out_proj, added to the residual stream. */
    __device__ __forceinline__ void out(Task task, unsigned now) {
        constexpr int N = most(1, InnerRows::ROWS / PAIRS), EACH = 32 / N; // rows of a warp, lanes of a row
        const int r = N * pair + lane / EACH;
        const bool mine = lane % EACH == 0 && r < task.count;
        Dated *place = x + Spread<8>::place(task.number * InnerRows::ROWS + (mine ? r : 0));
        const Dated seen = look(place);
        const float sum = add_up<N>([&](int i) { return N * pair + i; });
        if (mine) publish(place, wait_for(place, now, seen) + sum, now + 1);
    }

    __device__ __forceinline__ void head(Task task) {
        const int r = ROWS * pair + lane / 8;
        const float sum = add_up<ROWS>([&](int i) { return ROWS * pair + i; });
        if (lane % 8 == 0 && r < task.count) logits[task.number * HiddenRows::ROWS + r] = (T)sum;
    }
};
