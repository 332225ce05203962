/* The warps that make results of sums: the convolution's step, the states, the residual stream, logits. Each takes
   every eighth task of its block, and knows of it as soon as the block has taken it: so windows, constants and states
   are in its registers before the product is there. What it must wait for itself, B, C and dt, it waits for beside
   those who multiply. */
#pragma once
#include "../device/math.cuh"
#include "step_size.cuh"
#include "token_multiply.cuh"

struct Finisher {
    static constexpr int WORDS = (S::DSTATE + 127) / 128; // of 4 numbers, of a row of states, a lane

    Model model;
    T *logits;
    Dated *x, *mixed, *shared; // residual stream (Spread<8>), y · silu(z) in pairs (Spread<4>), B, C and dt
    const unsigned char *slots;
    Memory &memory;
    unsigned first_date;
    float lowest, highest;
    int number, lane; // of those who finish
    Phase<S::SLOTS> phase;
    unsigned parity = 0, date = 0; // of its tasks; of B and C below
    float B[WORDS][4], C[WORDS][4];

    __device__ __forceinline__ void run() {
        for (int i = 0; i < number; i++) phase.advance();
        for (;; parity ^= 1) {
            memory.announced.ring.full[number].wait(parity);
            const Task task = memory.announced.tasks[number];
            __syncwarp();
            if (lane == 0) memory.announced.ring.empty[number].arrive();
            const unsigned now = first_date + task.layer;
            switch (task.kind) {
            case EMBED:
                leave_slot();
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

    __device__ __forceinline__ void wait_sums() const { memory.sums.ring.full[number].wait(parity); }
    /* Its task's slot is needed no more, or has nothing for it: then as soon as it is filled. */
    __device__ __forceinline__ void leave_slot(bool filled = false) {
        if (!filled) memory.taken.ring.wait_full(phase);
        release_by_warp(memory.taken.ring, phase, lane);
        for (int i = 1; i < FINISHERS; i++) phase.advance();
    }
    /* Sums are needed no more. */
    __device__ __forceinline__ void take_sums() {
        __syncwarp();
        if (lane == 0) memory.sums.ring.empty[number].arrive();
    }
    /* The sums of the task's rows, that of row r in lanes 32 r / ROWS and on. */
    template <int ROWS> __device__ __forceinline__ float add_up() {
        float sums[ROWS] = {};
        wait_sums();
#pragma unroll
        for (int e = lane; e < Sums::ENTRIES; e += 32)
#pragma unroll
            for (int r = 0; r < ROWS; r++) sums[r] += memory.sums.at[number][r][e];
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
        const int row = task.number * 4 + lane / 8;
        const bool mine = lane % 8 == 0 && lane / 8 < task.count;
        Window window(model, task.layer, mine && row < 2 * S::DSTATE ? S::INNER + row : -1);
        leave_slot();
        const float sum = add_up<4>();
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
        const int at = 2 * task.number, head = at / S::HEADDIM;
        const Dated *dt = shared + 2 * S::DSTATE + head;
        const Dated seen = look(dt);
        const float rate = __ldg(model.constant(task.layer, A_AT) + head),
                    skip = __ldg(model.constant(task.layer, D_AT) + head),
                    bias = __ldg(model.constant(task.layer, DT_BIAS) + head);
        Window window(model, task.layer, lane % 8 == 0 && lane < 16 ? at + lane / 8 : -1);
        float4 h[2][WORDS], *states = reinterpret_cast<float4 *>(model.state(task.layer, at));
        memory.taken.ring.wait_full(phase);
        const float4 *from = reinterpret_cast<const float4 *>(slots + phase.stage * SLOT + STATES_AT);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                h[r][w] = from[r * (S::DSTATE / 4) + least(w * 32 + lane, S::DSTATE / 4 - 1)];
        fence_async_proxy(); // these loads are over when the next copy comes
        leave_slot(true);
        const float found = window.step(add_up<4>()); // x in lanes 0 and 8, z in 16 … 23 and 24 … 31

        if (date != now) wait_rows(now);
        const float step = step_size(wait_for(dt, now, seen) + bias, true, lowest, highest), decay = expf(rate * step);
        float y[2], in[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            in[r] = __shfl_sync(~0u, found, 8 * r), y[r] = 0;
            const float add = step * in[r];
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (w * 32 + lane >= S::DSTATE / 4) break;
                const float old[4] = {h[r][w].x, h[r][w].y, h[r][w].z, h[r][w].w};
                float moved[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    moved[i] = decay * old[i] + add * B[w][i];
                    y[r] += moved[i] * C[w][i];
                }
                __stwt(states + r * (S::DSTATE / 4) + w * 32 + lane, float4{moved[0], moved[1], moved[2], moved[3]});
            }
        }
        const float sum = warp_sums(y, lane); // of the first channel in lanes 0 … 15
        const float z = __shfl_sync(~0u, found, 16 + lane / 16 * 8);
        const float gated = (sum + skip * (lane < 16 ? in[0] : in[1])) * silu(z);
        const float next = __shfl_sync(~0u, gated, 16);
        if (lane == 0) publish(mixed + Spread<4>::place(at / 2), pack(gated, next, T()), now);
    }

    /* Rows of out_proj, added to the residual stream. */
    __device__ __forceinline__ void out(Task task, unsigned now) {
        constexpr int LANES = 32 / InnerRows::ROWS; // of a row
        const int r = lane / LANES;
        const bool mine = lane % LANES == 0 && r < task.count;
        Dated *place = x + Spread<8>::place(task.number * InnerRows::ROWS + (mine ? r : 0));
        const Dated seen = look(place);
        leave_slot();
        const float sum = add_up<InnerRows::ROWS>();
        if (mine) publish(place, wait_for(place, now, seen) + sum, now + 1);
    }

    __device__ __forceinline__ void head(Task task) {
        leave_slot();
        const float sum = add_up<4>();
        if (lane % 8 == 0 && lane / 8 < task.count) logits[task.number * 4 + lane / 8] = (T)sum;
    }
};
