"""Wrong answers to exercises 5 and 6 of chapter 18, in the form of mamba2.py's."""

from wrong.warp_gemv import changed

# Exercise 5: the state step

STEP = """
extern "C" __global__ void state_step(float *state, const float *x, const float *dt, const float *A, const float *B,
                                      const float *C, const float *D, float *y, int nheads, int headdim, int dstate,
                                      int ngroups) {
    const int lane = threadIdx.x % 32, channel = blockIdx.x * 8 + threadIdx.x / 32;
    const int head = blockIdx.y, sequence = blockIdx.z, group = head / (nheads / ngroups);
    if (channel >= headdim) return;
    const long long of_head = (long long)sequence * nheads + head, row = of_head * headdim + channel;
    const long long of_group = ((long long)sequence * ngroups + group) * dstate;
    const float step = dt[of_head], decay = expf(A[head] * step), at = x[row];
    float sum = 0;
    for (int n = lane; n < dstate; n += 32) {
        const float h = decay * state[row * dstate + n] + step * at * B[of_group + n];
        state[row * dstate + n] = h;
        sum += h * C[of_group + n];
    }
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) y[row] = sum + D[head] * at;
}
"""
LOOP = "for (int n = lane; n < dstate; n += 32) {"
SLICE = "const int part = (dstate + 31) / 32;\n    for (int n = lane * part; n < min(dstate, (lane + 1) * part); n++) {"
TWICE = (
    "        sum += h * C[of_group + n];\n    }\n",
    "    }\n    __syncwarp();\n    for (int n = lane; n < dstate; n += 32)\n"
    "        sum += ((volatile float *)state)[row * dstate + n] * C[of_group + n];\n",
)
ATOMIC = (
    "for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);\n    if (lane == 0) y[row] = ",
    "if (lane == 0) y[row] = D[head] * at;\n    __syncwarp();\n    atomicAdd(y + row, sum);\n    if (0) y[row] = ",
)
EX5 = {
    "the old state meets C": (
        changed(STEP, ("sum += h * C", "sum += (h - step * at * B[of_group + n]) * C")),
        "of y differ",
    ),
    "x without dt": (changed(STEP, ("step * at * B", "at * B")), "of state differ"),
    "dt twice": (changed(STEP, ("step * at * B", "step * step * at * B")), "of state differ"),
    "the decay without dt": (changed(STEP, ("expf(A[head] * step)", "expf(A[head])")), "of state differ"),
    "the decay to first order": (changed(STEP, ("expf(A[head] * step)", "(1 + A[head] * step)")), "of state differ"),
    "no D": (changed(STEP, (" + D[head] * at", "")), "of y differ"),
    "the state is not stored": (changed(STEP, ("state[row * dstate + n] = h;", "")), "of state differ"),
    "B and C of the first group": (changed(STEP, ("group = head / (nheads / ngroups)", "group = 0")), "ngroups = 2"),
    "groups in turn": (changed(STEP, ("head / (nheads / ngroups)", "head % ngroups")), "ngroups = 2"),
    "A of the next head": (changed(STEP, ("A[head]", "A[(head + 1) % nheads]")), "differ"),
    "dt of the first sequence": (changed(STEP, ("step = dt[of_head]", "step = dt[head]")), "batch = 2"),
    "B of the first sequence": (changed(STEP, ("((long long)sequence * ngroups + group)", "group")), "batch = 2"),
    "channels that are not there": (changed(STEP, ("if (channel >= headdim) return;", "")), "at batch = 1"),
    "numbers of whole warps": (changed(STEP, ("n < dstate;", "n < dstate / 32 * 32;")), "differ"),
    "the first 32 numbers": (changed(STEP, ("n < dstate;", "n < min(dstate, 32);")), "dstate = 33"),
    "half a warp's sum": (changed(STEP, ("far = 16", "far = 8")), "of y differ"),
    "each lane a piece of the row": (changed(STEP, (LOOP, SLICE)), "right, but"),
    "the state loaded twice": (changed(STEP, TWICE), "right, but"),
    "an atomic sum": (changed(STEP, ATOMIC), "atomic requests"),
    "all lanes store the same y": (changed(STEP, ("if (lane == 0) y", "y")), "store with 20,480 threads"),
    "all lanes store y, after a sum of lane 0": (
        changed(STEP, ("__shfl_xor_sync", "__shfl_down_sync"), ("if (lane == 0) y", "y")),
        "at batch = 1",
    ),
}

# Exercise 6: the gate within the norm

NORM = """
extern "C" __global__ void gated_norm(const float *y, const float *z, const float *weight, float *out, int d_inner,
                                      int ngroups, float eps) {
    __shared__ float sums[8];
    const int size = d_inner / ngroups, column = blockIdx.x * size;
    const long long first = (long long)blockIdx.y * d_inner + column;
    float g[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int n = threadIdx.x + 256 * i;
        g[i] = 0;
        if (n < size) g[i] = y[first + n] * z[first + n] / (1 + expf(-z[first + n]));
        sum += g[i] * g[i];
    }
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < 8; w++) sum += sums[w];
    const float scale = rsqrtf(sum / size + eps);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int n = threadIdx.x + 256 * i;
        if (n < size) out[first + n] = g[i] * scale * weight[column + n];
    }
}
"""
AGAIN = "y[first + n] * z[first + n] / (1 + expf(-z[first + n])) * scale"
EX6 = {
    "no gate": (changed(NORM, (" * z[first + n] / (1 + expf(-z[first + n]))", "")), "of out differ"),
    "a sigmoid, no silu": (changed(NORM, ("y[first + n] * z[first + n] /", "y[first + n] /")), "of out differ"),
    "silu by expf(z)": (
        changed(
            NORM,
            (
                "/ (1 + expf(-z[first + n]))",
                "* expf(z[first + n]) / (1 + expf(z[first + n]) * 0 + expf(-z[first + n]))",
            ),
        ),
        "of out differ",
    ),
    "the norm before the gate": (
        changed(NORM, ("sum += g[i] * g[i]", "if (n < size) sum += y[first + n] * y[first + n]")),
        "of out differ",
    ),
    "no barrier": (changed(NORM, ("    __syncthreads();\n", "")), "at "),
    "the first warp's sum": (changed(NORM, ("w < 8", "w < 1")), "of out differ"),
    "the sum, not the mean": (changed(NORM, ("sum / size", "sum")), "of out differ"),
    "the mean over d_inner": (changed(NORM, ("sum / size", "sum / d_inner")), "ngroups = 3"),
    "no eps": (changed(NORM, ("sum / size + eps", "sum / size")), "of out differ"),
    "no weight": (changed(NORM, (" * weight[column + n]", "")), "of out differ"),
    "the first group's weight": (changed(NORM, ("weight[column + n]", "weight[n]")), "ngroups = 3"),
    "512 numbers": (changed(NORM, ("i < 4", "i < 2"), ("g[4]", "g[2]")), "d_inner = 1030"),
    "threads without numbers leave early": (
        changed(NORM, ("float g[4], sum = 0;", "if (threadIdx.x >= size) return;\n    float g[4], sum = 0;")),
        "at ",
    ),
    "loaded again for the result": (
        changed(NORM, ("n] = g[i] * scale", "n] = " + AGAIN), ("const float *y", "const volatile float *y")),
        "right, but",
    ),
}

RIGHT = {5: STEP, 6: NORM}
WRONG = {5: EX5, 6: EX6}
