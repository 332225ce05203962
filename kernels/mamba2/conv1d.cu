/* Causal convolution of every channel with its own WIDTH taps, and silu:
   y[t] = silu(bias + Σ weight[k] x[t - WIDTH + 1 + k]).

   x, y (batch, seqlen, channels), x with strides; weight (channels, WIDTH), bias (channels,) or null; initial and final
   (batch, WIDTH - 1, channels): the inputs before the first token and the last ones, oldest first, or null. They may be
   one and the same where one thread has all tokens, as in a step of one token.

   A thread walks along `tokens` tokens of VEC channels, a word of up to 16 bytes, with the inputs that the taps still
   need in registers and the next AHEAD on their way. What two neighbouring walks both read is in L2: they run at about
   the same time.

   Sequences laid end to end (SEQUENCES): BY_NUMBER with seq_idx (batch, seqlen), where it changes another begins, and
   what lies before counts as 0. BY_BEGIN with cu_seqlens (count + 1,), where each begins, of batch 1: initial and final
   are then of each sequence, also of one without tokens, (count, WIDTH - 1, channels), and share no memory. Whatever
   cu_seqlens holds, nothing but these tensors is read or written: the first sequence begins at token 0, the last ends
   behind the last token, and of numbers that fall each token is in some sequence of the count.

   Reads and writes 2 bytes of a channel and token, for which a processor has some 40 instructions' time in all: so no
   step of a walk branches, and steps past its end are taken, but neither read nor write.

   Compile with DTYPE, VEC (channels, addresses and strides are multiples of it), WIDTH, AHEAD (a multiple of WIDTH
   spares moving the window from register to register), SEQUENCES. */
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "../device/half2.cuh"
#include "../device/words.cuh"

using T = DTYPE;
enum Sequences { ONE, BY_NUMBER, BY_BEGIN };
constexpr int PAST = WIDTH - 1;
using Channels = Word<T, VEC>;

__device__ __forceinline__ void store(T *to, const float (&from)[VEC]) {
    if constexpr (VEC == 1) *to = (T)from[0];
    else {
        typename WordOf<VEC * sizeof(T)>::type word;
        unsigned *pairs = reinterpret_cast<unsigned *>(&word);
#pragma unroll
        for (int i = 0; i < VEC; i += 2) pairs[i / 2] = pack(from[i], from[i + 1], T());
        *reinterpret_cast<decltype(word) *>(to) = word;
    }
}
__device__ __forceinline__ void widen(const Channels &word, float (&to)[VEC]) {
#pragma unroll
    for (int i = 0; i < VEC; i++) to[i] = element(word, i);
}

/* Which sequence a walk is in: its number, and of BY_BEGIN its first token and one past its last. */
struct Sequence {
    const int *of;
    int number = 0, begin = 0, end = 0, last = 0, tokens = 0;

    __device__ __forceinline__ Sequence(const int *sequences, int count, int t, int seqlen) : of(sequences) {
        if (SEQUENCES == BY_NUMBER) number = of[t];
        if (SEQUENCES != BY_BEGIN) return;
        int past = count; // the last that begins at t or before it
        while (past - number > 1) {
            const int middle = (number + past) / 2;
            if (of[middle] <= t) number = middle;
            else past = middle;
        }
        begin = number > 0 ? max(of[number], 0) : 0; // at most t, whatever the first says
        end = number + 1 < count ? of[number + 1] : seqlen;
        last = count - 1, tokens = seqlen;
    }
    /* Whether another begins at t: then it is that. */
    __device__ __forceinline__ bool moves_on(int t) {
        if (SEQUENCES == BY_NUMBER) {
            const bool other = of[t] != number;
            number = of[t];
            return other;
        }
        if (t != end || number >= last) return false;
        do {
            begin = end, number++;
            end = number < last ? of[number + 1] : tokens;
        } while (end <= t && number < last); // without tokens
        return true;
    }
};

/* The state of a sequence without tokens stays as it was. */
__device__ __forceinline__ void keep_empty(const T *initial, const int *begins, T *final, int count, int channels,
                                           int c) {
    for (int sequence = 0; sequence < count; sequence++) {
        if (begins[sequence] < begins[sequence + 1]) continue;
#pragma unroll
        for (int i = 0; i < PAST; i++) {
            const long long at = ((long long)sequence * PAST + i) * channels + c;
            float kept[VEC] = {};
            if (initial) widen(load_word<VEC>(initial + at), kept);
            store(final + at, kept);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 3)
conv1d(const T *x, const float *weight, const float *bias, const T *initial, const int *sequences, T *out, T *final,
       int batch, int seqlen, int channels, int tokens, int count, long long x_batch, long long x_token) {
    let_next_kernel_start();
    const int words = channels / VEC, walks = (seqlen + tokens - 1) / tokens;
    const long long id = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int c = (int)(id % words) * VEC, b = (int)(id / words / walks);
    if (b >= batch) return;
    const int begin = (int)(id / words % walks) * tokens, end = min(begin + tokens, seqlen);
    float taps[WIDTH][VEC], start[VEC];
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        start[i] = bias ? bias[c + i] : 0;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) taps[k][i] = weight[(long long)(c + i) * WIDTH + k];
    }
    wait_for_previous_kernel();

    x += b * x_batch + c;
    if (SEQUENCES == BY_NUMBER) sequences += (long long)b * seqlen;
    Sequence now(sequences, count, begin, seqlen);
    /* The i-th input of those before a sequence's first token, or of its state behind the last. */
    auto place = [&](int i) {
        return ((long long)(SEQUENCES == BY_BEGIN ? now.number : b) * PAST + i) * channels + c;
    };
    auto before = [&](int i) { return initial ? load_word<VEC>(initial + place(i)) : Channels{}; };
    /* The input at t, which may lie before the sequence's first token. */
    auto input = [&](int t) {
        if (SEQUENCES == BY_BEGIN ? t < now.begin : t < 0) {
            if (SEQUENCES == BY_NUMBER && sequences[0] != now.number) return Channels{};
            return before(t - now.begin + PAST);
        }
        if (SEQUENCES == BY_NUMBER && sequences[t] != now.number) return Channels{};
        return load_word<VEC>(x + t * x_token);
    };

    if (SEQUENCES == BY_BEGIN && final && begin == 0) keep_empty(initial, sequences, final, count, channels, c);
    float past[WIDTH][VEC];
    Channels next[AHEAD] = {};
#pragma unroll
    for (int k = 0; k < PAST; k++) widen(input(begin - PAST + k), past[k]);
    const T *from = x + begin * x_token;
    int left = end - begin; // tokens that have not been asked for
#pragma unroll
    for (int i = 0; i < AHEAD; i++, left--, from += x_token)
        if (left > 0) next[i] = load_word_streaming<VEC>(from);
    T *to = out + ((long long)b * seqlen + begin) * channels + c;
    for (int t = begin; t < end; t += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++, left--, from += x_token, to += channels) {
            const bool there = t + i < end;
            if (SEQUENCES && there && now.moves_on(t + i)) {
#pragma unroll
                for (int k = 0; k < PAST; k++) widen(SEQUENCES == BY_BEGIN ? before(k) : Channels{}, past[k]);
            }
            widen(next[i], past[PAST]);
            if (left > 0) next[i] = load_word_streaming<VEC>(from);
            float y[VEC];
#pragma unroll
            for (int v = 0; v < VEC; v++) {
                float sum = start[v];
#pragma unroll
                for (int k = 0; k < WIDTH; k++) sum += taps[k][v] * past[k][v];
                y[v] = sum * reciprocal_approx(1 + exp2_approx(-LOG2_E * sum));
            }
            if (there) store(to, y);
#pragma unroll
            for (int k = 0; k < PAST; k++)
#pragma unroll
                for (int v = 0; v < VEC; v++) past[k][v] = past[k + 1][v];
            if (SEQUENCES == BY_BEGIN && there && final && t + i + 1 == now.end)
#pragma unroll
                for (int k = 0; k < PAST; k++) store(final + place(k), past[k]);
        }
    }
    if (SEQUENCES == BY_BEGIN || !final || end < seqlen) return;
#pragma unroll
    for (int k = 0; k < PAST; k++) { // all of them read before the first is written: initial may be the same memory
        widen(input(seqlen - PAST + k), past[k]);
    }
#pragma unroll
    for (int k = 0; k < PAST; k++) store(final + place(k), past[k]);
}
