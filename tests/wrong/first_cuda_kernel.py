"""Wrong answers to the exercises of chapter 03. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer (the arguments of the
check), and words that the check's verdict must hold.
"""


def _kernel(signature, body):
    return f'extern "C" __global__ void {signature} {{\n{body}\n}}\n'


# Exercise 1: rows, columns, blocks


def grid(rows, cols):
    return -(-cols // 32), -(-rows // 8)


def _scale_rows(c="blockIdx.x * blockDim.x + threadIdx.x", r="blockIdx.y * blockDim.y + threadIdx.y", **changed):
    inside = changed.get("inside", "r < rows && c < cols")
    at = changed.get("at", "r * cols + c")
    body = f"    int c = {c}, r = {r};\n    if ({inside}) C[{at}] = s[r] * A[{at}];"
    return _kernel("scale_rows(const float *A, const float *s, float *C, int rows, int cols)", body)


SWAPPED = _scale_rows(c="blockIdx.y * blockDim.y + threadIdx.y", r="blockIdx.x * blockDim.x + threadIdx.x")
EX1 = {
    "dropped tail: the grid is rounded down": (
        (lambda rows, cols: (max(cols // 32, 1), max(rows // 8, 1)), _scale_rows()),
        "was never set",
    ),
    "the grid is rounded down, so that it is empty": (
        (lambda rows, cols: (cols // 32, rows // 8), _scale_rows()),
        "at least one block",
    ),
    "divides with /": ((lambda rows, cols: (cols / 32, rows / 8), _scale_rows()), "two whole numbers"),
    "forgets to return": ((lambda rows, cols: None, _scale_rows()), "expected a pair"),
    "coalescing that is not there: x runs along the rows": (
        (lambda rows, cols: (-(-rows // 32), -(-cols // 8)), SWAPPED),
        "right, but not coalesced: at rows = 61, cols = 96 a load of a warp touches",
    ),
    "grid and kernel disagree about x and y": ((grid, SWAPPED), "was never set"),
    "no bounds check": ((grid, _scale_rows(inside="true")), "but s has 1 element"),
    "checks the columns only": ((grid, _scale_rows(inside="c < cols")), "but "),
    "checks only that the element lies inside the matrix: a row runs over into the next": (
        (grid, _scale_rows(inside="r < rows && r * cols + c < rows * cols")),
        "race on C[",
    ),
    "right for square matrices only": ((grid, _scale_rows(at="r * rows + c")), "at rows = "),
    "a grid with many blocks too many": (
        (lambda rows, cols: (64, 64), _scale_rows()),
        "has blocks without any work; 1 × 1 are enough",
    ),
    "works in place and spoils A": (
        (grid, _scale_rows().replace("const float *A", "float *A").replace("s[r] * A[", "A[r * cols + c] = s[r] * A[")),
        "changed A",
    ),
    "uniform-input luck: takes the factor of the first row of the block": (
        (grid, _scale_rows().replace("s[r]", "s[blockIdx.y * blockDim.y]")),
        "of C differ",
    ),
}

# Exercise 2: a loop for any grid

FIRST, THREADS = "blockIdx.x * blockDim.x + threadIdx.x", "gridDim.x * blockDim.x"


def _axpy(body):
    return _kernel("axpy(float a, const float *x, float *y, int n)", body)


def _stride(first=FIRST, step=THREADS, last="i < n"):
    return _axpy(f"    for (int i = {first}; {last}; i += {step}) y[i] += a * x[i];")


EX2 = {
    "dropped tail: one element a thread, as if there were enough threads": (
        (_axpy(f"    int i = {FIRST};\n    if (i < n) y[i] += a * x[i];"),),
        "was left out",
    ),
    "the stride is one block: other blocks do the same again": ((_stride(step="blockDim.x"),), "at n = "),
    "every block does everything": ((_stride(first="threadIdx.x", step="blockDim.x"),), "at n = "),
    "the stride counts blocks, not threads": ((_stride(step="gridDim.x"),), "at n = "),
    "the last element and one more": ((_stride(last="i <= n"),), "but x has 1 element"),
    "coalescing that is not there: a range of neighbouring elements for each thread": (
        (
            _axpy(
                f"    int each = (n + {THREADS} - 1) / ({THREADS}), from = ({FIRST}) * each;\n"
                "    for (int i = from; i < from + each && i < n; i++) y[i] += a * x[i];"
            ),
        ),
        "right, but not coalesced: at n = 2048, 2 blocks of 256 a load of a warp touches 16 sectors",
    ),
    "one thread does it all": (
        (_axpy(f"    if ({FIRST} == 0)\n        for (int i = 0; i < n; i++) y[i] += a * x[i];"),),
        "the warps make 4,096 load requests; 128 are enough",
    ),
    "forgets what was in y": (
        (_stride().replace("y[i] += a", "y[i] = a"),),
        "of y differ",
    ),
    "an endless loop: the index never moves": (
        (_axpy(f"    for (int i = {FIRST}; i < n;) ((volatile float *)y)[i] = a * x[i];"),),
        "is there an endless loop?",
    ),
    "does not compile": ((_axpy("    int i = blockIdx.x * blockDim.x + thread;"),), 'identifier "thread" is undefined'),
    "another name": ((_stride().replace("axpy", "saxpy"),), "module has no kernel 'axpy'"),
    "no extern C": ((_stride().replace('extern "C" ', ""),), 'Write extern "C" before __global__'),
    "another list of parameters": ((_stride().replace("float a, ", "").replace("a *", "2 *"),), "as in the stub"),
}

# Exercise 3: 16 bytes a lane

AT = "int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);"
WIDE = """float4 v = *(const float4 *)(x + i);
        v.x *= factor; v.y *= factor; v.z *= factor; v.w *= factor;
        *(float4 *)(y + i) = v;"""
TAIL = "for (; i < n; i++) y[i] = factor * x[i];"


def _scale4(body):
    return _kernel("scale4(const float *x, float *y, float factor, int n)", body)


EX3 = {
    "dropped tail": ((_scale4(f"    {AT}\n    if (i + 3 < n) {{\n        {WIDE}\n    }}"),), "y[0] was never set"),
    "looks at the first element only: the last float4 hangs over the end": (
        (_scale4(f"    {AT}\n    if (i < n) {{\n        {WIDE}\n    }}"),),
        "but x has 1 element",
    ),
    "coalescing that is not there: four loads in a row instead of a wide one": (
        (_scale4(f"    {AT}\n    for (int k = 0; k < 4; k++)\n        if (i + k < n) y[i + k] = factor * x[i + k];"),),
        "right, but at n = 8192 the warps make 256 load requests; wanted: at most 64",
    ),
    "loads wide, but stores one by one": (
        (
            _scale4(
                f"    {AT}\n    if (i + 3 < n) {{\n        float4 v = *(const float4 *)(x + i);\n"
                "        y[i] = factor * v.x; y[i + 1] = factor * v.y;\n"
                "        y[i + 2] = factor * v.z; y[i + 3] = factor * v.w;\n"
                f"    }} else {TAIL}"
            ),
        ),
        "256 store requests",
    ),
    "only 8 bytes a lane": (
        (
            _scale4(
                f"    {AT}\n    for (int k = 0; k < 4; k += 2, i += 2)\n        if (i + 1 < n) {{\n"
                "            float2 v = *(const float2 *)(x + i);\n            v.x *= factor; v.y *= factor;\n"
                "            *(float2 *)(y + i) = v;\n        } else if (i < n) y[i] = factor * x[i];"
            ),
        ),
        "the warps make 128 load requests",
    ),
    "forgets the factor 4: lanes overlap, and the address is no multiple of 16": (
        (_scale4(f"    {AT.replace('4 * ', '')}\n    if (i + 3 < n) {{\n        {WIDE}\n    }} else {TAIL}"),),
        "at n = 4: kernel scale4: race on y[1]",
    ),
    "off by one: the last full float4 is done one by one": (
        (_scale4(f"    {AT}\n    if (i + 4 < n) {{\n        {WIDE}\n    }} else {TAIL}"),),
        "right, but at n = 8192",
    ),
    "every thread does the whole tail": (
        (
            _scale4(
                f"    {AT}\n    if (i + 3 < n) {{\n        {WIDE}\n    }}\n"
                "    for (int k = n / 4 * 4; k < n; k++) y[k] = factor * x[k];"
            ),
        ),
        "load requests; wanted: at most 67",
    ),
    "uniform-input luck: all four take the first": (
        (
            _scale4(
                f"    {AT}\n    if (i + 3 < n) {{\n        {WIDE.replace('v.y *=', 'v.y = v.x; v.y *= 1 + 0 *')}\n"
                f"    }} else {TAIL}"
            ),
        ),
        "of y differ",
    ),
}

# Exercise 4: find the bug

FETCH = """    int c = blockIdx.x * blockDim.x + threadIdx.x;
    int i = blockIdx.y * blockDim.y + threadIdx.y;
    if (i >= n || c >= cols) return;
    out[(long long)i * cols + c] = scale * table[(long long)ids[i] * cols + c];"""


def _fetch(*changes):
    body = FETCH
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    parameters = "const signed char *table, const int *ids, float *out, int n, int cols, float scale"
    return (_kernel(f"fetch_rows({parameters})", body),)


SQUARE = ("blockIdx.y * blockDim.y", "blockIdx.y * blockDim.x")
EX4 = {
    "as it was": (
        _fetch(SQUARE, ("i >= n", "i > n"), ("(long long)ids[i]", "ids[i]"), ("(long long)i", "i")),
        "but ids has 1 element",
    ),
    "square blocks only": (_fetch(SQUARE), "blocks of 32 × 8"),
    "one row too many": (_fetch(("i >= n", "i > n")), "but ids has 1 element"),
    "one column too many, written over by the next row: a race": (
        _fetch(("c >= cols", "c > cols")),
        "at n = 1, cols = 1",
    ),
    "32 bits: the product overflows": (_fetch(("(long long)ids[i]", "ids[i]")), "with a table of 5.1 GB"),
    "64 bits too late: the product is done in 32": (
        _fetch(("(long long)ids[i] * cols + c", "(long long)(ids[i] * cols + c)")),
        "with a table of 5.1 GB",
    ),
    "unsigned gives one bit, and the table needs two": (
        _fetch(("(long long)ids[i] * cols + c", "(unsigned)ids[i] * (unsigned)cols + c")),
        "with a table of 5.1 GB",
    ),
    "dropped tail: the last row is never fetched": (_fetch(("i >= n", "i >= n - 1")), "was never set"),
}

# Exercise 5: a GEMV with coalesced loads


def _gemv_t(loop, row="blockIdx.x * blockDim.x + threadIdx.x", store="partial[blockIdx.y * rows + r] = sum;"):
    body = f"    int r = {row};\n    if (r >= rows) return;\n    float sum = 0;\n    {loop}\n    {store}"
    return (_kernel("gemv_t(const float *Wt, const float *x, float *partial, int rows, int cols)", body),)


ADD = "sum += Wt[(long long)c * rows + r] * x[c];"
LOOP = f"for (int c = blockIdx.y; c < cols; c += gridDim.y) {ADD}"
EX5 = {
    "dropped tail: cols / splits columns each": (
        _gemv_t(
            "int each = cols / gridDim.y, first = blockIdx.y * each;\n"
            f"    for (int c = first; c < first + each; c++) {ADD}"
        ),
        "of partial.sum(0) differ",
    ),
    "the last split takes all that is left": (
        _gemv_t(
            "int each = cols / gridDim.y, end = blockIdx.y + 1 == gridDim.y ? cols : (blockIdx.y + 1) * each;\n"
            f"    for (int c = blockIdx.y * each; c < end; c++) {ADD}"
        ),
        "they may differ by one at most",
    ),
    "one split does it all, the others add nothing": (
        _gemv_t(f"if (blockIdx.y == 0)\n        for (int c = 0; c < cols; c++) {ADD}"),
        "they may differ by one at most",
    ),
    "every split does it all": (_gemv_t(f"for (int c = 0; c < cols; c++) {ADD}"), "partial.sum(0)[0] is 2, expected 1"),
    "all splits write to the same place: a race": (
        _gemv_t(LOOP, store="partial[r] = sum;"),
        "at rows = 1, cols = 1, 2 splits",
    ),
    "splits without columns write nothing": (
        _gemv_t(f"if (blockIdx.y >= cols) return;\n    {LOOP}"),
        "partial sums were never set",
    ),
    "reads the matrix as if it were stored by rows": (
        _gemv_t(LOOP.replace("(long long)c * rows + r", "(long long)r * cols + c")),
        "at rows = 3, cols = 2",
    ),
    "coalescing that is not there: neighbouring threads take rows far apart": (
        _gemv_t(LOOP, row="threadIdx.x * gridDim.x + blockIdx.x"),
        "right, but not coalesced: at rows = 1024, cols = 203, 8 splits a load of a warp touches",
    ),
    "blocks of 256 threads, whatever was launched": (
        _gemv_t(LOOP, row="blockIdx.x * 256 + threadIdx.x"),
        "blocks of 128",
    ),
    "the sum is never set": (
        (_gemv_t(LOOP)[0].replace("float sum = 0;", "float sum;"),),
        "`sum` is read before it is set",
    ),
    "no bounds check": ((_gemv_t(LOOP)[0].replace("    if (r >= rows) return;\n", ""),), "has 1 element"),
    "reads everything twice": (
        _gemv_t(
            LOOP.replace(
                ADD,
                "sum += 0.5f * ((volatile float *)Wt)[c * rows + r] * x[c] "
                "+ 0.5f * ((volatile float *)Wt)[c * rows + r] * x[c];",
            )
        ),
        "load requests",
    ),
    "keeps the sum in memory": (
        _gemv_t(
            f"partial[blockIdx.y * rows + r] = 0;\n    {LOOP}".replace("sum +=", "partial[blockIdx.y * rows + r] +="),
            store="",
        ),
        "store requests",
    ),
    "adds to what was there": (
        _gemv_t(LOOP, store="partial[blockIdx.y * rows + r] += sum;"),
        "or only added to",
    ),
}

WRONG = {1: EX1, 2: EX2, 3: EX3, 4: EX4, 5: EX5}
RIGHT = {  # what the wrong answers were made from
    1: (grid, _scale_rows()),
    2: _stride(first=f"(long long){FIRST}").replace("int i", "long long i"),
    3: _scale4(f"    {AT}\n    if (i + 3 < n) {{\n        {WIDE}\n    }} else {TAIL}"),
    4: _fetch(),
    5: _gemv_t(LOOP),
}
