"""Wrong answers to the exercises of chapter 04. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold.
"""

ADD = "for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);"


def changed(source, *pairs):
    """The source with some words replaced; each must be there."""
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


# Exercise 1: the largest of 32


def _max(body, before=""):
    return f"{before}__device__ float warp_max(float value) {{\n    {body}\n    return value;\n}}\n"


SHUFFLES = "for (int far = 16; far > 0; far /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, far));"

# Exercise 2: softmax

SOFTMAX = """
extern "C" __global__ void softmax(const float *x, float *y, int rows, int cols) {
    int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const float *from = x + (long long)row * cols;
    float *to = y + (long long)row * cols;
    float most = -1.0f / 0.0f, sum = 0;
    for (int c = lane; c < cols; c += 32) most = fmaxf(most, from[c]);
    for (int far = 16; far > 0; far /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, far));
    for (int c = lane; c < cols; c += 32) sum += expf(from[c] - most);
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    for (int c = lane; c < cols; c += 32) to[c] = expf(from[c] - most) / sum;
}
"""
WALK = "for (int c = lane; c < cols; c += 32)"

# Exercise 3: the mended GEMV

GEMV = """
extern "C" __global__ void gemv(const float *W, const float *x, float *y, int rows, int cols) {
    __shared__ float sums[8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int first = blockIdx.x * 8; first < rows; first += gridDim.x * 8) {
        int row = first + warp;
        float sum = 0;
        if (row < rows)
            for (int c = lane; c < cols; c += 32) sum += W[(long long)row * cols + c] * x[c];
        for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        if (threadIdx.x < 8 && first + threadIdx.x < rows) y[first + threadIdx.x] = sums[threadIdx.x];
        __syncthreads(); // 2
    }
}
"""
LANES_WITHOUT_COLUMNS = (
    f"        if (row < rows)\n            {WALK} sum += W[(long long)row * cols + c] * x[c];\n        {ADD}\n",
    f"        if (row < rows && lane < cols) {{\n            {WALK} sum += W[(long long)row * cols + c] * x[c];\n"
    f"            {ADD}\n        }}\n",
)

# Exercise 4: sums of squares

SQUARES = """
extern "C" __global__ void row_squares(const float *W, float *out, int rows, int cols) {
    int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const float *from = W + (long long)row * cols;
    float sum = 0;
    int head = (4 - (unsigned long long)from / 4 % 4) % 4;
    if (head > cols) head = cols;
    int words = (cols - head) / 4, tail = head + 4 * words;
    const float4 *wide = (const float4 *)(from + head);
    if (lane < head) sum += from[lane] * from[lane];
    for (int i = lane; i < words; i += 32) {
        float4 v = wide[i];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    if (tail + lane < cols) sum += from[tail + lane] * from[tail + lane];
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) out[row] = sum;
}
"""
HEAD = "int head = (4 - (unsigned long long)from / 4 % 4) % 4;\n"

# Exercise 5: transpose

TRANSPOSE = """
extern "C" __global__ void transpose(const float *A, float *B, int rows, int cols) {
    __shared__ float tile[32][33];
    int left = blockIdx.x * 32, top = blockIdx.y * 32, x = threadIdx.x, y = threadIdx.y;
    for (int k = y; k < 32; k += 8)
        if (top + k < rows && left + x < cols) tile[k][x] = A[(long long)(top + k) * cols + left + x];
    __syncthreads();
    for (int k = y; k < 32; k += 8)
        if (left + k < cols && top + x < rows) B[(long long)(left + k) * rows + top + x] = tile[x][k];
}
"""
DIRECT = """
extern "C" __global__ void transpose(const float *A, float *B, int rows, int cols) {
    int c = blockIdx.x * 32 + threadIdx.x;
    for (int r = blockIdx.y * 32 + threadIdx.y; r < blockIdx.y * 32 + 32; r += 8)
        if (r < rows && c < cols) B[(long long)c * rows + r] = A[(long long)r * cols + c];
}
"""

# Exercise 6: RMSNorm

RMSNORM = """
extern "C" __global__ void rmsnorm(const float *x, const float *weight, float *y, int cols, float epsilon) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float *from = x + (long long)blockIdx.x * cols;
    float *to = y + (long long)blockIdx.x * cols;
    __shared__ float sums[32];
    float sum = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += from[c] * from[c];
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = lane < blockDim.x / 32 ? sums[lane] : 0;
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    float scale = rsqrtf(sum / cols + epsilon);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) to[c] = from[c] * scale * weight[c];
}
"""
SECOND = f"    sum = lane < blockDim.x / 32 ? sums[lane] : 0;\n    {ADD}\n"
LEAVE = "    if (lane >= blockDim.x / 32) return;\n"
SHARED_TREE = """
    __shared__ float sums[1024];
    float sum = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += from[c] * from[c];
    sums[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    for (int t = 0; t < blockDim.x; t++) sum += sums[t];
    float scale"""

RIGHT = {1: _max(SHUFFLES), 2: SOFTMAX, 3: GEMV, 4: SQUARES, 5: TRANSPOSE, 6: RMSNORM}

WRONG = {
    1: {
        "shuffles down, so that only lane 0 is sure of the result": (
            _max(SHUFFLES.replace("xor", "down")),
            "lane 1 got",
        ),
        "four steps in place of five: halves of the warp, at a distance of one, never meet": (
            _max(SHUFFLES.replace("far > 0", "far > 1")),
            "wrong with all values negative: the largest is -968, in lane 0, and lane 1 got",
        ),
        "starts at a distance of 8": (_max(SHUFFLES.replace("far = 16", "far = 8")), "lane 16 got"),
        "starts from 0, which is larger than any negative value": (
            _max(f"value = fmaxf(value, 0); {SHUFFLES}"),
            "wrong with all values negative: the largest is -968, in lane 0, and lane 0 got 0",
        ),
        "starts from a large negative number that is not -infinity": (
            _max(f"value = fmaxf(value, -1e30f); {SHUFFLES}"),
            "wrong with all values -inf",
        ),
        "adds in place of taking the larger": (
            _max(ADD.replace("sum", "value")),
            "wrong with all values negative",
        ),
        "the mask leaves out half of the lanes": (
            _max(SHUFFLES.replace("0xffffffff", "0x0000ffff")),
            "at all values negative",
        ),
        "through shared memory": (
            _max(
                "int first = threadIdx.x / 32 * 32;\n    held[threadIdx.x] = value;\n    __syncwarp();\n"
                "    for (int k = 0; k < 32; k++) value = fmaxf(value, held[first + k]);\n    __syncwarp();",
                "__shared__ float held[1024];\n",
            ),
            "requests to shared memory: shuffles need none",
        ),
        "hears from one lane after another: right, and 31 shuffles": (
            _max(
                "float own = value;\n    for (int k = 1; k < 32; k++) "
                "value = fmaxf(value, __shfl_xor_sync(0xffffffff, own, k));"
            ),
            "right, but a warp executes",
        ),
        "does not compile": (_max("return fmaxf(value)"), "does not compile"),
        "another name": ("__device__ float warpmax(float value) { return value; }", "no function `__device__ float"),
    },
    2: {
        "shuffles down, so that only lane 0 has the sum": (
            changed(SOFTMAX, ("sum += __shfl_xor_sync", "sum += __shfl_down_sync")),
            "wrong at rows = 1, cols = 2",
        ),
        "no maximum: e to the 500 is infinite": (
            changed(SOFTMAX, ("from[c] - most", "from[c]")),
            "with values near 500",
        ),
        "the maximum starts from 0, so that e to the -500 is all there is": (
            changed(SOFTMAX, ("most = -1.0f / 0.0f", "most = 0")),
            "with values near -500",
        ),
        "each lane subtracts its own maximum: the reduction is missing": (
            changed(SOFTMAX, (SHUFFLES.replace("value", "most"), "")),
            "wrong at rows = 1, cols = 2",
        ),
        "dropped tail: only whole groups of 32 columns": (
            changed(SOFTMAX, (WALK, "for (int c = lane; c < cols / 32 * 32; c += 32)")),
            "wrong at rows = 1, cols = 1",
        ),
        "lanes without an element leave before the shuffles": (
            changed(SOFTMAX, ("if (row >= rows) return;", "if (row >= rows || lane >= cols) return;")),
            # lanes that have ended are no longer waited for, but what they hold is not to be read
            "reads lane 16 in this shuffle, which has left the kernel: its value is undefined",
        ),
        "the sum is never set": (changed(SOFTMAX, (", sum = 0;", ", sum;")), "`sum` is read before it is set"),
        "forgets that the last block may have warps without a row": (
            changed(SOFTMAX, ("if (row >= rows) return;", "")),
            "at rows = 1, cols = 1",
        ),
        "each lane has a piece of the row in one: right, but lanes are far apart": (
            changed(SOFTMAX, (WALK, "for (int n = (cols + 31) / 32, c = lane * n; c < lane * n + n && c < cols; c++)")),
            "right, but not coalesced",
        ),
        "exponentials are stored and read again: a load and a store too many": (
            changed(
                SOFTMAX,
                ("sum += expf(from[c] - most);", "{ to[c] = expf(from[c] - most); sum += to[c]; }"),
                ("to[c] = expf(from[c] - most) / sum;", "to[c] = to[c] / sum;"),
            ),
            "store requests; wanted: at most 2,048",
        ),
        "writes over its input": (changed(SOFTMAX, ("const float *x", "float *x"), ("*to = y", "*to = x")), "y"),
    },
    3: {
        "only the race is mended": (changed(GEMV, LANES_WITHOUT_COLUMNS), "the mask names lanes 1-31"),
        "only the shuffle is mended": (changed(GEMV, ("__syncthreads(); // 2", "")), "race on"),
        "a barrier for the warp only": (
            changed(GEMV, ("__syncthreads(); // 2", "__syncwarp();")),
            "race on",
        ),
        "the barrier stands in a branch that eight threads take": (
            changed(
                GEMV,
                ("__syncthreads(); // 2", ""),
                (
                    "if (threadIdx.x < 8 && first + threadIdx.x < rows) y[first + threadIdx.x] = sums[threadIdx.x];",
                    "if (threadIdx.x < 8 && first + threadIdx.x < rows) {\n"
                    "            y[first + threadIdx.x] = sums[threadIdx.x];\n            __syncthreads();\n        }",
                ),
            ),
            "at rows = ",
        ),
        "lane 0 stores at once: no race, and no shared store": (
            changed(
                GEMV,
                ("if (lane == 0) sums[warp] = sum;", "if (lane == 0 && row < rows) y[row] = sum;"),
                (
                    "if (threadIdx.x < 8 && first + threadIdx.x < rows) y[first + threadIdx.x] = sums[threadIdx.x];",
                    "",
                ),
            ),
            "store requests; wanted: at most 32",
        ),
        "asks only the lanes that happen to be there, and lanes that are not": (
            changed(GEMV, LANES_WITHOUT_COLUMNS, ("0xffffffff", "__activemask()")),
            "Let all 32 lanes come to the shuffle",
        ),
        "only one round: rows beyond the grid's warps are left out": (
            changed(GEMV, ("first += gridDim.x * 8", "first = rows")),
            "was never set",
        ),
    },
    4: {
        "no head: the words are not aligned": (
            changed(SQUARES, (HEAD, "int head = 0;\n")),
            "16 bytes at once must start at a multiple of 16 bytes",
        ),
        "head and offset mixed up": (
            changed(SQUARES, (HEAD, "int head = (unsigned long long)from / 4 % 4;\n")),
            "must start at a multiple of 16 bytes",
        ),
        "forgets that a row may end before its head does": (
            changed(SQUARES, ("if (head > cols) head = cols;", "")),
            "at rows = 9, cols = ",
        ),
        "an aligned row has a head of four, counted by words too": (
            changed(
                SQUARES,
                (HEAD, "int head = 4 - (unsigned long long)from / 4 % 4;\n"),
                ("(cols - head) / 4, tail = head + 4 * words", "(cols - head) / 4, tail = head + 4 * words"),
            ),
            "load requests; wanted",
        ),
        "dropped tail": (
            changed(SQUARES, ("if (tail + lane < cols) sum += from[tail + lane] * from[tail + lane];", "")),
            "wrong at rows = 1, cols = 1",
        ),
        "the tail is counted by every lane": (
            changed(
                SQUARES,
                ("if (tail + lane < cols)", "for (; tail < cols; tail++)"),
                ("from[tail + lane] * from[tail + lane]", "from[tail] * from[tail]"),
            ),
            "wrong at rows = 1, cols = 1",
        ),
        "wide loads only if all rows are aligned: right, but slow for 4097 columns": (
            changed(
                SQUARES,
                (HEAD, "int head = cols % 4 ? cols : 0;\n"),
                ("if (lane < head) sum", "for (int c = lane; c < head; c += 32) sum"),
                ("from[lane] * from[lane]", "from[c] * from[c]"),
            ),
            "right, but at rows = 16, cols = 4097",
        ),
        "no wide loads at all": (
            changed(
                SQUARES,
                (HEAD, "int head = cols;\n"),
                ("if (lane < head) sum", "for (int c = lane; c < head; c += 32) sum"),
                ("from[lane] * from[lane]", "from[c] * from[c]"),
            ),
            "right, but at rows = 16, cols = 4096 the warps make 2,048 load requests; wanted: at most 512",
        ),
        "each lane has its words in one piece: few requests, but many sectors": (
            changed(
                SQUARES,
                (
                    "for (int i = lane; i < words; i += 32) {",
                    "int n = (words + 31) / 32;\n    for (int i = lane * n; i < lane * n + n && i < words; i++) {",
                ),
            ),
            "a load of a warp touches 32 sectors",
        ),
        "sums in half the lanes": (changed(SQUARES, ("i += 32", "i += 64")), "wrong at rows = "),
    },
    5: {
        "no shared memory: stores down a column": (DIRECT, "a store of a warp touches 32 sectors"),
        "a tile of 32 × 32: coalesced, but a column lies in one bank": (
            changed(TRANSPOSE, ("[33]", "[32]")),
            "bank conflicts in shared memory: a load of a warp takes 32 wavefronts",
        ),
        "two floats more a row: every other bank": (
            changed(TRANSPOSE, ("[33]", "[34]")),
            "a load of a warp takes 2 wavefronts",
        ),
        "no barrier": (changed(TRANSPOSE, ("__syncthreads();", "")), "race on"),
        "a barrier for each warp only": (changed(TRANSPOSE, ("__syncthreads();", "__syncwarp();")), "race on"),
        "right for squares: rows and columns mixed up in the second check": (
            changed(TRANSPOSE, ("if (left + k < cols && top + x < rows)", "if (left + k < rows && top + x < cols)")),
            "rows = 1, cols = 5",
        ),
        "the row of B is as long as that of A": (
            changed(TRANSPOSE, ("(left + k) * rows", "(left + k) * cols")),
            "at rows = 1, cols = 5",
        ),
        "no bounds check for loads": (
            changed(TRANSPOSE, ("if (top + k < rows && left + x < cols) ", "")),
            "at rows = 1, cols = 1",
        ),
        "threads outside leave before the barrier": (
            changed(
                TRANSPOSE,
                (
                    "    for (int k = y; k < 32; k += 8)\n        if (top",
                    "    if (left + x >= cols) return;\n    for (int k = y; k < 32; k += 8)\n        if (top",
                ),
            ),
            "rows = 5, cols = 1",
        ),
        "the tile is not turned: a block's own tile comes out as it went in": (
            changed(TRANSPOSE, ("tile[x][k]", "tile[k][x]")),
            "rows = ",
        ),
        "every element is loaded twice": (
            changed(
                TRANSPOSE,
                ("    int left", "    const volatile float *a = A;\n    int left"),
                ("tile[k][x] = A[", "tile[k][x] = a[(long long)(top + k) * cols + left + x], tile[k][x] = a["),
            ),
            "load requests; wanted: at most 384",
        ),
    },
    6: {
        "no barrier between the two steps": (changed(RMSNORM, ("__syncthreads();", "")), "race on"),
        "the sum is never set": (changed(RMSNORM, ("float sum = 0;", "float sum;")), "`sum` is read before it is set"),
        "threads without a column leave before the shuffles": (
            changed(RMSNORM, ("    __shared__", "    if (threadIdx.x >= cols) return;\n    __shared__")),
            "reads lane 16 in this shuffle, which has left the kernel: its value is undefined",
        ),
        "lanes without a warp's sum leave before the second step": (
            changed(
                RMSNORM,
                ("    sum = lane < blockDim.x / 32 ? sums[lane] : 0;", LEAVE + "    sum = sums[lane];"),
            ),
            "reads lane 16 in this shuffle, which has left the kernel: its value is undefined",
        ),
        "only warp 0 has the total": (
            changed(RMSNORM, (SECOND, f"    if (warp == 0) {{\n    {SECOND}    }}\n")),
            "wrong at rows = ",
        ),
        "the total goes back through sums[0] with no barrier after it": (
            changed(
                RMSNORM,
                (
                    SECOND,
                    f"    if (warp == 0) {{\n    {SECOND}        if (lane == 0) sums[0] = sum;\n    }}\n"
                    "    sum = sums[0];\n",
                ),
            ),
            "race on",
        ),
        "adds up 32 sums, of which the last warps' were never written": (
            changed(RMSNORM, ("lane < blockDim.x / 32 ? sums[lane] : 0", "sums[lane]")),
            "at rows = 1, cols = 1",
        ),
        "always eight warps": (changed(RMSNORM, ("lane < blockDim.x / 32", "lane < 8")), "blocks of 32"),
        "the second step starts at a distance of 4, enough for 8 warps": (
            changed(RMSNORM, (SECOND, SECOND.replace("far = 16", "far = 4"))),
            "wrong at rows = ",
        ),
        "the mean over threads, not over columns": (
            changed(RMSNORM, ("sum / cols", "sum / blockDim.x")),
            "wrong at rows = 1, cols = 1",
        ),
        "epsilon after the root": (
            changed(RMSNORM, ("rsqrtf(sum / cols + epsilon)", "1 / (sqrtf(sum / cols) + epsilon)")),
            "wrong at rows = ",
        ),
        "a row is no longer than its block": (
            changed(
                RMSNORM, ("for (int c = threadIdx.x; c < cols; c += blockDim.x)", "if (int c = threadIdx.x; c < cols)")
            ),
            "wrong at rows = ",
        ),
        "every thread adds up every thread's sum": (
            RMSNORM[: RMSNORM.index("    __shared__")] + SHARED_TREE.lstrip("\n") + RMSNORM.split("float scale")[1],
            "requests to shared memory; wanted: at most 512",
        ),
        "each thread has a piece of the row in one": (
            changed(
                RMSNORM,
                (
                    "for (int c = threadIdx.x; c < cols; c += blockDim.x)",
                    "for (int n = (cols + blockDim.x - 1) / blockDim.x, c = threadIdx.x * n; "
                    "c < threadIdx.x * n + n && c < cols; c++)",
                ),
            ),
            "right, but not coalesced",
        ),
    },
}
