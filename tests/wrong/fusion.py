"""Wrong answers to the exercises of chapter 05. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer (the arguments of the
check), and words that the check's verdict must hold.
"""


def changed(source, *changes):
    """The source with each (old, new) replaced; old must be there."""
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return (source,)


# Exercise 1: what does it save?


def weights(hidden, ffn):
    return 2 * hidden * ffn + 2 * hidden + ffn


def unfused(hidden, ffn, tokens, size):
    return 7, size * (weights(hidden, ffn) + tokens * (9 * hidden + 6 * ffn))


def fused(hidden, ffn, tokens, size):
    return 2, size * (weights(hidden, ffn) + tokens * (3 * hidden + 2 * ffn))


def half(hidden, ffn):
    return -(-weights(hidden, ffn) // (3 * hidden + 2 * ffn))


def one_token(function):
    """The same for a single token, whatever was asked."""
    return lambda hidden, ffn, tokens, size: function(hidden, ffn, 1, size)


EX1 = {
    "forgets the residual's launch": (
        (lambda *case: (6, unfused(*case)[1]), fused, half),
        "counts 6 launches, expected 7",
    ),
    "the norm stays a launch of its own": (
        (unfused, lambda *case: (3, fused(*case)[1]), half),
        "counts 3 launches, expected 2",
    ),
    "weights are read again for each token": (
        (lambda h, f, t, s: (7, s * t * (weights(h, f) + 9 * h + 6 * f)), fused, half),
        "(1, 1, 2, 1) counts 40 bytes, expected 35",
    ),
    "uniform-input luck: one token": ((one_token(unfused), fused, half), "(1, 1, 2, 1) counts 20 bytes, expected 35"),
    "uniform-input luck: numbers of one byte": (
        (unfused, lambda h, f, t, s: fused(h, f, t, 1), half),
        "(1, 1, 1, 2) counts 10 bytes, expected 20",
    ),
    "the fused block does not read x again for the residual": (
        (unfused, lambda h, f, t, s: (2, fused(h, f, t, s)[1] - s * t * h), half),
        "counts 9 bytes, expected 10: 5 weights and 5 numbers of vectors",
    ),
    "forgets the biases": (
        (lambda h, f, t, s: (7, unfused(h, f, t, s)[1] - s * (h + f)), fused, half),
        "counts 18 bytes, expected 20",
    ),
    "half a launch": ((lambda *case: (7.0, unfused(*case)[1]), fused, half), "expected two whole numbers"),
    "only the bytes": ((lambda *case: unfused(*case)[1], fused, half), "expected a pair"),
    "forgets to return": ((unfused, lambda *case: None, half), "gave None"),
    "rounds the tokens down": (
        (unfused, fused, lambda h, f: max(1, weights(h, f) // (3 * h + 2 * f))),
        "moves at most half",
    ),
    "one token too many where it comes out even": (
        (unfused, fused, lambda h, f: weights(h, f) // (3 * h + 2 * f) + 1),
        "gave 2, expected 1",
    ),
    "where the vectors outweigh the weights": (
        (unfused, fused, lambda h, f: -(-weights(h, f) // (9 * h + 6 * f))),
        "moves at most half",
    ),
    "divides with /": ((unfused, fused, lambda h, f: weights(h, f) / (3 * h + 2 * f)), "expected a whole number"),
}

# Exercise 2: a wide epilogue

BIAS_RESIDUAL = """
extern "C" __global__ void bias_residual(const float *W, const float *x, const float *bias, float *h, int rows,
                                         int cols) {
    __shared__ float sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 32 + warp;
    float sum = 0;
    if (row < rows)
        for (int c = lane; c < cols; c += 32) sum += W[(long long)row * cols + c] * x[c];
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    int r = blockIdx.x * 32 + lane;
    if (warp == 0 && r < rows) h[r] += bias[r] + sums[lane];
}
"""
EPILOGUE = BIAS_RESIDUAL[BIAS_RESIDUAL.index("    if (lane == 0) sums") : BIAS_RESIDUAL.index("}\n", -3)]
EX2 = {
    "coalescing that is not there: lane 0 of each warp stores its own": (
        changed(BIAS_RESIDUAL, (EPILOGUE, "    if (lane == 0 && row < rows) h[row] += bias[row] + sum;\n")),
        "right, but at rows = 256, cols = 96 the warps make 256 store requests; 8 are enough",
    ),
    "stores together, but each warp fetches its own residual": (
        changed(
            BIAS_RESIDUAL,
            ("sums[warp] = sum;", "sums[warp] = sum + (row < rows ? bias[row] + h[row] : 0);"),
            ("h[r] += bias[r] + sums[lane]", "h[r] = sums[lane]"),
        ),
        "load requests; 1,552 are enough",
    ),
    "each warp adds its result with an atomic": (
        changed(
            BIAS_RESIDUAL,
            ("h[r] += bias[r] + sums[lane]", "atomicAdd(h + r, bias[r])"),
            ("    __syncthreads();\n", "    if (lane == 0 && row < rows) atomicAdd(h + row, sum);\n"),
        ),
        "264 atomic requests",
    ),
    "a race: no barrier": (changed(BIAS_RESIDUAL, ("    __syncthreads();\n", "")), "race"),
    "a race: every warp stores all results": (changed(BIAS_RESIDUAL, ("warp == 0 && ", "")), "race on h[0]"),
    "forgets what was in h": (changed(BIAS_RESIDUAL, ("h[r] +=", "h[r] =")), "of h differ"),
    "forgets the bias": (changed(BIAS_RESIDUAL, ("bias[r] + ", "")), "of h differ"),
    "uniform-input luck: the bias of the block's first row": (
        changed(BIAS_RESIDUAL, ("bias[r]", "bias[blockIdx.x * 32]")),
        "of h differ",
    ),
    "every lane adds the residual before the sum over the warp": (
        changed(
            BIAS_RESIDUAL,
            ("    for (int far", "    if (row < rows) sum += h[row] + bias[row];\n    for (int far"),
            ("h[r] += bias[r] + sums[lane]", "h[r] = sums[lane]"),
        ),
        "of h differ",
    ),
    "eight blocks only": (
        changed(BIAS_RESIDUAL, ("r < rows", "blockIdx.x < 8 && r < rows")),
        "of h differ. h[256] is",
    ),
    "dropped tail: whole blocks only": (
        changed(BIAS_RESIDUAL, ("r < rows", "blockIdx.x * 32 + 32 <= rows")),
        "wrong at rows = 1, cols = 1",
    ),
    "out of bounds: no check of the row": (changed(BIAS_RESIDUAL, (" && r < rows", "")), "but bias has 1 element"),
    "the sums of a warp that has no row, written to the last": (
        changed(BIAS_RESIDUAL, ("int r = blockIdx.x * 32 + lane;", "int r = min(blockIdx.x * 32 + lane, rows - 1);")),
        "race on h[0]",
    ),
}

# Exercise 3: add and norm

ADD_NORM = """
__device__ float block_sum(float v, float *partial) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int far = 16; far > 0; far /= 2) v += __shfl_xor_sync(0xffffffff, v, far);
    if (lane == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < warps ? partial[lane] : 0;
    for (int far = 16; far > 0; far /= 2) v += __shfl_xor_sync(0xffffffff, v, far);
    return v;
}

extern "C" __global__ void add_norm(float *h, float *delta, const float *weight, int cols, float eps) {
    __shared__ float partial[32];
    h += (long long)blockIdx.x * cols;
    delta += (long long)blockIdx.x * cols;
    float v[16], squares = 0;
#pragma unroll
    for (int k = 0; k < 16; k++) {
        int c = threadIdx.x + 256 * k;
        v[k] = 0;
        if (c < cols) h[c] = v[k] = h[c] + delta[c];
        squares += v[k] * v[k];
    }
    float scale = rsqrtf(block_sum(squares, partial) / cols + eps);
#pragma unroll
    for (int k = 0; k < 16; k++) {
        int c = threadIdx.x + 256 * k;
        if (c < cols) delta[c] = v[k] * scale * weight[c];
    }
}
"""
TWO_PASSES = """    float squares = 0;
    for (int c = threadIdx.x; c < cols; c += 256) {
        float sum = h[c] + delta[c];
        h[c] = sum;
        squares += sum * sum;
    }
    float scale = rsqrtf(block_sum(squares, partial) / cols + eps);
    for (int c = threadIdx.x; c < cols; c += 256) delta[c] = h[c] * scale * weight[c];
}
"""
EX3 = {
    "fetches h again for the second pass": (
        (ADD_NORM[: ADD_NORM.index("    float v[16]")] + TWO_PASSES,),
        "right, but at tokens = 3, cols = 1024 the warps make 384 load requests; 288 are enough",
    ),
    "normalises the residual alone": (
        changed(ADD_NORM, ("h[c] = v[k] = h[c] + delta[c];", "{ v[k] = h[c]; h[c] += delta[c]; }")),
        "of delta differ",
    ),
    "does not keep the sum": (
        changed(ADD_NORM, ("h[c] = v[k] = h[c] + delta[c]", "v[k] = h[c] + delta[c]")),
        "of h differ",
    ),
    "fetches and stores h with an atomic, which is not counted as a load": (
        changed(ADD_NORM, ("h[c] = v[k] = h[c] + delta[c]", "v[k] = delta[c], v[k] += atomicAdd(h + c, v[k])")),
        "96 atomic requests",
    ),
    "the result goes over h": (
        changed(ADD_NORM, ("delta[c] = v[k] * scale", "h[c] = v[k] * scale")),
        "of h differ",
    ),
    "eps outside of the root": (
        changed(ADD_NORM, ("/ cols + eps)", "/ cols) + eps")),
        "at tokens = 2, cols = 96, with numbers around 0.001",
    ),
    "no eps": (changed(ADD_NORM, (" + eps", "")), "with numbers around 0.001"),
    "mean over the threads, not over the columns": (
        changed(ADD_NORM, ("partial) / cols", "partial) / 256")),
        "wrong at tokens = 1, cols = 1",
    ),
    "every warp on its own: the sum of 32 lanes": (
        changed(ADD_NORM, ("    v = lane < warps ? partial[lane] : 0;\n    for", "    return v;\n    for")),
        "of delta differ",
    ),
    "dropped tail: whole blocks of 256 columns only": (
        changed(
            ADD_NORM, ("16; k++", "cols / 256; k++"), ("#pragma unroll\n", ""), ("float v[16],", "float v[16] = {},")
        ),
        "wrong at tokens = 1, cols = 1",
    ),
    "dropped tail: the first 2048 columns": (
        changed(ADD_NORM, ("k < 16", "k < 8")),
        "wrong at tokens = 2, cols = 4096",
    ),
    "the sum of squares is never set": (
        changed(ADD_NORM, ("squares = 0;", "squares;")),
        "`squares` is read before it is set",
    ),
    "kept numbers behind the end are never set": (
        changed(ADD_NORM, ("        v[k] = 0;\n", "")),
        "`v` is read before it is set",
    ),
    "threads behind the end leave before the shuffle": (
        changed(ADD_NORM, ("    float v[16]", "    if (threadIdx.x >= cols) return;\n    float v[16]")),
        "reads lane 16 in this shuffle, which has left the kernel: its value is undefined",
    ),
    "three tokens only": (
        changed(ADD_NORM, ("    float v[16]", "    if (blockIdx.x >= 3) return;\n    float v[16]")),
        "of h differ. h[3, 0] is",
    ),
    "the kept numbers lie in local memory": (
        changed(ADD_NORM, ("#pragma unroll", "#pragma unroll 1")),
        "loads from local memory: an array of a thread that is in no register",
    ),
    "uniform-input luck: the first token's row for all": (
        changed(ADD_NORM, ("    h += (long long)blockIdx.x * cols;\n", "")),
        "race on h[0]",
    ),
    "out of bounds: no check of the column": (changed(ADD_NORM, ("if (c < cols) ", "")), "1 element"),
    "a race: no barrier in the block's sum": (changed(ADD_NORM, ("    __syncthreads();\n", "")), "race"),
    "wrong precision: sums rounded to 16 bits": (
        changed("#include <cuda_bf16.h>\n" + ADD_NORM, ("rsqrtf(block", "(float)(__nv_bfloat16)rsqrtf(block")),
        "of delta differ",
    ),
    "coalescing that is not there: 16 neighbouring columns for each thread": (
        changed(ADD_NORM, ("threadIdx.x + 256 * k", "16 * threadIdx.x + k")),
        "right, but",
    ),
}

# Exercise 4: find the bug

NORM_RESIDUAL = """
__device__ float warp_sum(float v) {
    for (int far = 16; far > 0; far /= 2) v += __shfl_xor_sync(0xffffffff, v, far);
    return v;
}

extern "C" __global__ void norm_residual(const float *W, const float *g, float *h, float *out, int n, float eps) {
    __shared__ float partial[8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 8 + warp;
    float part = 0, squares = 0, sum = 0;
    for (int c = threadIdx.x; c < n; c += 256) part += h[c] * h[c];
    part = warp_sum(part);
    if (lane == 0) partial[warp] = part;
    __syncthreads();
    for (int w = 0; w < 8; w++) squares += partial[w];
    float scale = rsqrtf(squares / n + eps);
    if (row >= n) return;
    for (int c = lane; c < n; c += 32) sum += W[(long long)row * n + c] * h[c] * g[c];
    sum = warp_sum(sum);
    if (lane == 0) out[row] = h[row] + sum * scale;
}
"""
BARRIER = ("    __syncthreads();\n", "")
EPS = ("/ n + eps)", "/ n) + eps")
UNDONE = """    if (lane == 0) {
        volatile float *mine = h + row;
        float before = *mine;
        *mine += sum * scale;
        out[row] = *mine;
        *mine = before;
    }"""
IN_PLACE = ("out[row] = h[row] +", "out[row] = h[row] +=")
EX4 = {
    "as it was": (changed(NORM_RESIDUAL, BARRIER, EPS, IN_PLACE), "at n = 1: kernel norm_residual: race on"),
    "the barrier is still missing": (changed(NORM_RESIDUAL, BARRIER), "race on"),
    "a barrier of the warp only": (changed(NORM_RESIDUAL, ("__syncthreads", "__syncwarp")), "race on"),
    "eps is still outside": (changed(NORM_RESIDUAL, EPS), "with numbers around 0.001 in h"),
    "eps dropped": (changed(NORM_RESIDUAL, (" + eps", "")), "with numbers around 0.001 in h"),
    "eps under the root, but of the sum": (
        changed(NORM_RESIDUAL, ("squares / n + eps", "(squares + eps) / n")),
        "with numbers around 0.001 in h",
    ),
    "h is still written over": (changed(NORM_RESIDUAL, IN_PLACE), "the kernel changed h"),
    "h is written over, and put right again at the end: a race": (
        changed(
            NORM_RESIDUAL,
            ("    if (lane == 0) out[row] = h[row] + sum * scale;", UNDONE),
        ),
        "race on h[",
    ),
    "a barrier before h is written: the other blocks do not wait at it": (
        changed(
            NORM_RESIDUAL,
            ("    if (row >= n) return;\n", ""),
            ("for (int c = lane; c < n;", "for (int c = lane; row < n && c < n;"),
            ("    if (lane == 0) out", "    __syncthreads();\n    if (lane == 0 && row < n) out"),
            IN_PLACE,
        ),
        "changed h",
    ),
    "every warp adds up the squares by itself, from the start": (
        changed(
            NORM_RESIDUAL,
            (
                "    for (int w = 0; w < 8; w++) squares += partial[w];",
                "    for (int c = lane; c < n; c += 32) squares += h[c] * h[c];\n    squares = warp_sum(squares);",
            ),
        ),
        "load requests; 1,152 are enough",
    ),
    "the first 300 only": (changed(NORM_RESIDUAL, ("row >= n", "row >= min(n, 300)")), "out[300] was never set"),
    "forgets the residual": (changed(NORM_RESIDUAL, ("h[row] + sum", "sum")), "of out differ"),
    "dropped tail: whole blocks of 8 rows": (
        changed(NORM_RESIDUAL, ("row >= n", "blockIdx.x * 8 + 8 > n")),
        "never set",
    ),
}

# Exercise 5: LayerNorm, folded

LAYER_NORM = """
__device__ float warp_sum(float v) {
    for (int far = 16; far > 0; far /= 2) v += __shfl_xor_sync(0xffffffff, v, far);
    return v;
}

extern "C" __global__ void layer_norm_gemv(const float *W, const float *x, const float *g, const float *b, float *out,
                                           int rows, int cols, float eps) {
    int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    float wxg = 0, wg = 0, wb = 0, sum = 0, squares = 0;
    for (int c = lane; c < cols; c += 32) {
        float w = W[(long long)row * cols + c], v = x[c], scaled = w * g[c];
        wxg += scaled * v;
        wg += scaled;
        wb += w * b[c];
        sum += v;
        squares += v * v;
    }
    wxg = warp_sum(wxg);
    wg = warp_sum(wg);
    wb = warp_sum(wb);
    float mean = warp_sum(sum) / cols;
    float variance = fmaxf(warp_sum(squares) / cols - mean * mean, 0);
    if (lane == 0) out[row] = (wxg - mean * wg) * rsqrtf(variance + eps) + wb;
}
"""
LOOP = LAYER_NORM[LAYER_NORM.index("    float wxg") : LAYER_NORM.index("    if (lane == 0)")]
THREE_PASSES = """    float sum = 0, squares = 0, wn = 0;
    for (int c = lane; c < cols; c += 32) sum += x[c];
    float mean = warp_sum(sum) / cols;
    for (int c = lane; c < cols; c += 32) squares += (x[c] - mean) * (x[c] - mean);
    float scale = rsqrtf(warp_sum(squares) / cols + eps);
    for (int c = lane; c < cols; c += 32) wn += W[(long long)row * cols + c] * ((x[c] - mean) * scale * g[c] + b[c]);
    wn = warp_sum(wn);
"""
EX5 = {
    "three passes over x": (
        changed(LAYER_NORM, (LOOP, THREE_PASSES), ("(wxg - mean * wg) * rsqrtf(variance + eps) + wb", "wn")),
        "right, but at rows = 64, cols = 512 the warps make 6,144 load requests; 4,224 are enough",
    ),
    "RMSNorm: the mean stays": (
        changed(LAYER_NORM, ("- mean * wg", ""), ("- mean * mean", "")),
        "of out differ",
    ),
    "takes the mean away from the sum, not from x": (
        changed(LAYER_NORM, ("mean * wg", "mean")),
        "of out differ",
    ),
    "divides by cols - 1": (
        changed(
            LAYER_NORM,
            ("(squares) / cols - mean * mean", "(squares) / max(cols - 1, 1) - mean * mean * cols / max(cols - 1, 1)"),
        ),
        "of out differ",
    ),
    "eps outside of the root": (changed(LAYER_NORM, ("variance + eps)", "variance) + eps")), "of out differ"),
    "the bias is added as if it were one of rows": (
        changed(LAYER_NORM, ("eps) + wb", "eps) + b[row % cols]")),
        "of out differ",
    ),
    "the bias is scaled, too": (
        changed(
            LAYER_NORM,
            ("(wxg - mean * wg) * rsqrtf(variance + eps) + wb", "(wxg - mean * wg + wb) * rsqrtf(variance + eps)"),
        ),
        "of out differ",
    ),
    "uniform-input luck: g is taken to be 1": (changed(LAYER_NORM, ("w * g[c]", "w")), "of out differ"),
    "dropped tail: whole warps of columns": (
        changed(LAYER_NORM, ("c < cols;", "c < cols / 32 * 32;")),
        "wrong at rows = 1, cols = 1",
    ),
    "a sum is never set": (changed(LAYER_NORM, ("sum = 0,", "sum,")), "a variable is read before it is set"),
    "512 columns only": (changed(LAYER_NORM, ("c < cols;", "c < min(cols, 512);")), "of out differ"),
    "the variance may be just below 0": (
        changed(
            LAYER_NORM, ("fmaxf(warp_sum(squares) / cols - mean * mean, 0)", "warp_sum(squares) / cols - mean * mean")
        ),
        "with all of x 33.3: 10 of 10 elements of out differ. out[0] is nan",
    ),
    "lane 0 keeps its own part: one sum is not put together": (
        changed(LAYER_NORM, ("    wg = warp_sum(wg);\n", "")),
        "of out differ",
    ),
    "out of bounds: no check of the row": (changed(LAYER_NORM, ("    if (row >= rows) return;\n", "")), "1 element"),
    "one thread for each row": (
        changed(
            LAYER_NORM,
            (
                "int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;",
                "int row = blockIdx.x * 8 + threadIdx.x;",
            ),
            ("row >= rows", "threadIdx.x >= 8 || row >= rows"),
            ("int c = lane; c < cols; c += 32", "int c = 0; c < cols; c++"),
            ("warp_sum(wxg)", "wxg"),
            ("warp_sum(wg)", "wg"),
            ("warp_sum(wb)", "wb"),
            ("warp_sum(sum)", "sum"),
            ("warp_sum(squares)", "squares"),
            ("if (lane == 0) ", ""),
        ),
        "right, but",
    ),
}

WRONG = {1: EX1, 2: EX2, 3: EX3, 4: EX4, 5: EX5}
