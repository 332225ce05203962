/* The tokens that in_proj's tiles could not convolve (prompt_in.cu): the first WIDTH - 1 of each 64, of all channels, and
   the convolution's state behind the last token.

   edges (strips, 2 (WIDTH - 1), channels): of each 64 tokens the first inputs, and the last; initial, final
   (WIDTH - 1, channels), the inputs before the first token and the last ones, or null; taps (channels, WIDTH), bias
   (channels,) or null; y (m, ·) with `stride` numbers from token to token, from the first channel on. channels a
   multiple of 8. A thread for 8 channels of a strip; a row of blocks for each strip. initial and final may be the same
   memory: one thread reads the one and writes the other. */
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/pdl.cuh"

using T = DTYPE;
constexpr int PAST = WIDTH - 1, VEC = 8, STRIP = 64;

extern "C" __global__ void __launch_bounds__(128)
conv_edges(const T *edges, const T *initial, const float *taps, const float *bias, T *y, T *final, long long m,
           int channels, long long stride) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int c = ((int)blockIdx.y * 128 + (int)threadIdx.x) * VEC, strip = blockIdx.x;
    if (c >= channels) return;
    /* The input of token t, from WIDTH - 1 before a strip on: of its last ones, or of its first. */
    auto input = [&](long long t) {
        if (t < 0)
            return initial ? *reinterpret_cast<const uint4 *>(initial + (t + PAST) * channels + c) : uint4{};
        const long long of = t / STRIP, rows = min((long long)STRIP, m - of * STRIP);
        const int r = (int)(t - of * STRIP), row = r < PAST ? r : (int)(r - rows) + 2 * PAST;
        return *reinterpret_cast<const uint4 *>(edges + (of * 2 * PAST + row) * channels + c);
    };
    uint4 last[PAST];
#pragma unroll
    for (int i = 0; i < PAST; i++) last[i] = final && strip == 0 ? input(m - PAST + i) : uint4{};
    float x[2 * PAST][VEC], start[VEC];
#pragma unroll
    for (int i = 0; i < 2 * PAST; i++) {
        const long long t = (long long)strip * STRIP - PAST + i;
        widen(t < m ? input(t) : uint4{}, x[i], T());
    }
    if (final && strip == 0) // of the initial inputs all that this strip needs has been read
#pragma unroll
        for (int i = 0; i < PAST; i++) *reinterpret_cast<uint4 *>(final + (long long)i * channels + c) = last[i];
    float by[VEC][WIDTH];
#pragma unroll
    for (int v = 0; v < VEC; v++) {
        start[v] = bias ? bias[c + v] : 0;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) by[v][k] = taps[(long long)(c + v) * WIDTH + k];
    }
#pragma unroll
    for (int i = 0; i < PAST; i++) {
        const long long t = (long long)strip * STRIP + i;
        if (t >= m) return;
        float sum[VEC];
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            sum[v] = start[v];
#pragma unroll
            for (int k = 0; k < WIDTH; k++) sum[v] += by[v][k] * x[i + k][v];
            sum[v] *= reciprocal_approx(1 + exp2_approx(-LOG2_E * sum[v]));
        }
        *reinterpret_cast<uint4 *>(y + t * stride + c) = {pack(sum[0], sum[1], T()), pack(sum[2], sum[3], T()),
                                                          pack(sum[4], sum[5], T()), pack(sum[6], sum[7], T())};
    }
}
