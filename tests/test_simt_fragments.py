"""nvcuda::wmma on the SIMT machine: matrices that a warp holds together."""

import numpy as np
import pytest

import simt

SHAPES = {"square": (16, 16, 16), "tall": (32, 8, 16), "wide": (8, 32, 16), "tf32": (16, 16, 8)}
KERNELS = {  # name: shape, type of A and B and of their memory, of the sums, layouts of A, B and the sums
    "square_rows": ("square", "half", "half", "float", "row", "row", "row"),
    "square_columns": ("square", "half", "half", "half", "col", "col", "col"),
    "tall_bf16": ("tall", "__nv_bfloat16", "__nv_bfloat16", "float", "row", "col", "col"),
    "wide_halves": ("wide", "half", "half", "half", "col", "row", "row"),
    "wide_bytes": ("wide", "signed char", "signed char", "int", "col", "row", "col"),
    "tall_bytes": ("tall", "unsigned char", "unsigned char", "int", "row", "col", "row"),
    "tf32": ("tf32", "wmma::precision::tf32", "float", "float", "row", "row", "row"),
}
HEAD = "#include <mma.h>\n#include <cuda_bf16.h>\nusing namespace nvcuda;\n"


def kernel(name, shape, kind, memory, sums, a, b, c):
    size = ", ".join(map(str, SHAPES[shape]))
    return f"""
extern "C" __global__ void {name}(const {memory}* a, const {memory}* b, {sums}* c, int lda, int ldb, int ldc) {{
    wmma::fragment<wmma::matrix_a, {size}, {kind}, wmma::{a}_major> left;
    wmma::fragment<wmma::matrix_b, {size}, {kind}, wmma::{b}_major> right;
    wmma::fragment<wmma::accumulator, {size}, {sums}> sum;
    wmma::load_matrix_sync(left, a, lda);
    wmma::load_matrix_sync(right, b, ldb);
    wmma::load_matrix_sync(sum, c, ldc, wmma::mem_{c}_major);
    for (int i = 0; i < left.num_elements; i++) left.x[i] = left.x[i] + left.x[i];
    wmma::mma_sync(sum, left, right, sum);
    for (int i = 0; i < sum.num_elements; i++) sum.x[i] = sum.x[i] + {sums}(1);
    wmma::store_matrix_sync(c, sum, ldc, wmma::mem_{c}_major);
}}"""


@pytest.fixture(scope="module")
def module():
    return simt.compile(HEAD + "".join(kernel(name, *facts) for name, facts in KERNELS.items()))


def in_memory(matrix, layout, kind):
    """Rows or columns one after another, with 16 numbers between two."""
    lines = np.ascontiguousarray(np.pad(matrix if layout == "row" else matrix.T, [(0, 0), (0, 16)]))
    if kind == "__nv_bfloat16":
        return (lines.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    kinds = {
        "half": np.float16,
        "float": np.float32,
        "int": np.int32,
        "signed char": np.int8,
        "unsigned char": np.uint8,
    }
    return lines.astype(kinds[kind])


@pytest.mark.parametrize("name", KERNELS)
def test_products_are_exact(module, name):
    shape, _, memory, sums, *layouts = KERNELS[name]
    (m, n, k), rng = SHAPES[shape], np.random.default_rng(0)
    low = 0 if "unsigned" in memory else -9
    numbers = rng.integers(low, 9, (m, k)), rng.integers(low, 9, (k, n)), rng.integers(-9, 9, (m, n))
    a, b, c = (in_memory(x, *how) for x, how in zip(numbers, zip(layouts, (memory, memory, sums))))
    module[name](1, 32, a, b, c, *(np.int32(x.shape[1]) for x in (a, b, c)))
    result = c[:, :-16] if layouts[2] == "row" else c[:, :-16].T
    assert (result == 2 * numbers[0] @ numbers[1] + numbers[2] + 1).all()


def test_counts_are_those_of_the_machine_code(module):
    """It has four loads of a word for A and for B, four of two words for the sums, and as many stores."""
    a, b, c = np.ones((16, 16), np.float16), np.ones((16, 16), np.float16), np.zeros((16, 16), np.float32)
    report = module["square_rows"](1, 32, a, b, c, np.int32(16), np.int32(16), np.int32(16))
    counters = report.counters
    assert counters["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"] == 12
    assert counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == 4 * 8 + 4 * 8 + 4 * 8
    assert counters["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"] == 4


TILED = r"""
extern "C" __global__ void tiled(const half* a, const half* b, float* c, int n) {
    __shared__ half as[32][16], bs[16][32];
    int warp = threadIdx.x / 32, row = blockIdx.y * 32, column = blockIdx.x * 32;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0.0f);
    for (int k = 0; k < n; k += 16) {
        for (int i = threadIdx.x; i < 512; i += blockDim.x) {
            as[i / 16][i % 16] = a[(row + i / 16) * n + k + i % 16];
            bs[i / 32][i % 32] = b[(k + i / 32) * n + column + i % 32];
        }
        __syncthreads();
        wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
        wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> right;
        wmma::load_matrix_sync(left, &as[warp / 2 * 16][0], 16);
        wmma::load_matrix_sync(right, &bs[0][warp % 2 * 16], 32);
        wmma::mma_sync(sum, left, right, sum);
        __syncthreads();
    }
    wmma::store_matrix_sync(c + (row + warp / 2 * 16) * n + column + warp % 2 * 16, sum, n, wmma::mem_row_major);
}"""


def test_a_tiled_product_through_shared_memory():
    rng, n = np.random.default_rng(0), 64
    a, b = rng.integers(-4, 5, (2, n, n)).astype(np.float16)
    c = np.zeros((n, n), np.float32)
    report = simt.compile(HEAD + TILED)["tiled"]((2, 2), 128, a, b, c, np.int32(n), check_races=True)
    assert (c == a.astype(float) @ b.astype(float)).all()
    line = next(n for n, text in enumerate((HEAD + TILED).split("\n"), 1) if "load_matrix_sync(left" in text)
    assert report.lines[line]["smsp__inst_executed_op_shared_ld.sum"] == 4 * 4 * 4  # as one ldmatrix each


def test_a_matrix_that_ends_too_early_is_a_fault_at_its_line(module):
    a, b, c = np.ones((15, 16), np.float16), np.ones((16, 16), np.float16), np.zeros((16, 16), np.float32)
    with pytest.raises(simt.MemoryFault, match=r"line \d+ `wmma::load_matrix_sync\(left, a, lda\);`.* a"):
        module["square_rows"](1, 32, a, b, c, np.int32(16), np.int32(16), np.int32(16))


def test_what_is_not_covered_says_so():
    source = """
extern "C" __global__ void doubles(double* c) {
    wmma::fragment<wmma::accumulator, 8, 8, 4, double> sum;
    wmma::load_matrix_sync(sum, c, 8, wmma::mem_row_major);
    wmma::store_matrix_sync(c, sum, 8, wmma::mem_row_major);
}"""
    with pytest.raises(simt.Unsupported, match=r"line 7 .*wmma of this shape or these types"):
        simt.compile(HEAD + source)["doubles"](1, 32, np.zeros(64))
