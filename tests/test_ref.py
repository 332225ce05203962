"""The references against other ways to say the same, and the floors: nothing imports what stands above it."""

import ast
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ref.gemv
import ref.matmul
from ref import roofline
from ref.roofline import MISTRAL_7B, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
SIZES, SEEDS = st.integers(0, 9), st.integers(0, 1 << 32)
# few examples and no deadline: other work may run on the same two cores
quick = settings(max_examples=30, deadline=None)


def whole_numbers(seed, *shapes, dtype=np.float32):
    """Arrays of small whole numbers: every order of adding gives the same sum, to the last bit."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-9, 10, shape).astype(dtype) for shape in shapes]


# Products


@quick
@given(SIZES, SIZES, SEEDS, st.sampled_from([np.float16, np.float32, np.float64, np.int8]))
def test_gemv(rows, cols, seed, dtype):
    W, x = whole_numbers(seed, (rows, cols), cols, dtype=dtype)
    wanted = [sum(int(w) * int(v) for w, v in zip(row, x)) for row in W]
    found = [ref.gemv.gemv(W, x), ref.gemv.gemv_loops(W, x)]
    for got in (*found, np.einsum("rc,c->r", W.astype(np.float64), x)):
        assert got.shape == (rows,) and got.dtype == np.float64
        assert got.tolist() == wanted


@quick
@given(SIZES, SIZES, SIZES, SEEDS, st.integers(1, 5))
def test_matmul(m, n, k, seed, tile):
    A, B = whole_numbers(seed, (m, k), (k, n))
    wanted = [[sum(int(A[i, p]) * int(B[p, j]) for p in range(k)) for j in range(n)] for i in range(m)]
    found = [ref.matmul.matmul(A, B), ref.matmul.matmul_loops(A, B), ref.matmul.matmul_tiled(A, B, tile)]
    for got in (*found, np.einsum("ik,kj->ij", A.astype(np.float64), B)):
        assert got.shape == (m, n) and got.dtype == np.float64
        assert got.tolist() == wanted


def test_matmul_tiled_on_random_numbers_at_its_own_tile():
    rng = np.random.default_rng()
    A, B = rng.standard_normal((67, 97)), rng.standard_normal((97, 33))
    np.testing.assert_allclose(ref.matmul.matmul_tiled(A, B), A @ B, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("product", [ref.gemv.gemv, ref.gemv.gemv_loops])
def test_gemv_adds_in_float64(product):
    W = np.array([[1e8, 1, -1e8]], np.float32)  # in float32 the 1 is lost
    assert product(W, np.ones(3, np.float32)).tolist() == [1]
    assert product(np.full((1, 3), 60000, np.float16), np.ones(3, np.float16)).tolist() == [180000]


@pytest.mark.parametrize("product", [ref.gemv.gemv, ref.gemv.gemv_loops])
def test_gemv_multiplies_in_float64(product):
    third = np.float32(1 / 3)
    assert product(np.full((1, 1), third), np.full(1, third)).tolist() == [float(third) ** 2]
    assert product(np.full((1, 1), 1 / 3), np.ones(1)).tolist() == [1 / 3]


@pytest.mark.parametrize("product", [ref.matmul.matmul, ref.matmul.matmul_loops, ref.matmul.matmul_tiled])
def test_matmul_adds_in_float64(product):
    A = np.array([[1e8, 1, -1e8]], np.float32)
    assert product(A, np.ones((3, 2), np.float32)).tolist() == [[1, 1]]
    third = np.full((1, 1), 1 / 3, np.float32)
    assert product(third, third).item() == third.item() ** 2
    assert product(np.full((1, 1), 1 / 3), np.ones((1, 1))).item() == 1 / 3


def test_nan_reaches_its_row_and_no_other():
    W, x = np.ones((3, 4)), np.ones(4)
    W[1, 2] = np.nan
    assert np.isnan(ref.gemv.gemv(W, x)).tolist() == [False, True, False]
    assert np.isnan(ref.matmul.matmul(W, np.ones((4, 2)))).tolist() == [[False] * 2, [True] * 2, [False] * 2]


# Bytes and flops of one token

SMALL = ModelConfig("small", layers=3, hidden=10, ffn=7, n_heads=4, n_kv_heads=2, head_dim=5, vocab=11)


def shapes_of(c):
    """{name: shape} of every weight, as a checkpoint of such a model lists them."""
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = {"embed_tokens": (c.vocab, c.hidden), "lm_head": (c.vocab, c.hidden), "norm": (c.hidden,)}
    for i in range(c.layers):
        layer = {"q_proj": (q, c.hidden), "o_proj": (c.hidden, q)}
        layer |= {"k_proj": (kv, c.hidden), "v_proj": (kv, c.hidden)}
        layer |= {"gate": (c.ffn, c.hidden), "up": (c.ffn, c.hidden), "down": (c.hidden, c.ffn)}
        layer |= {"input_norm": (c.hidden,), "post_norm": (c.hidden,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def test_mistral_has_as_many_parameters_as_its_checkpoint():
    assert MISTRAL_7B.parameters == 7_241_732_096


@pytest.mark.parametrize("model", [SMALL, MISTRAL_7B, roofline.LLAMA_2_7B, roofline.LLAMA_3_8B])
def test_weights_counted_one_matrix_at_a_time(model):
    shapes = shapes_of(model)
    assert model.parameters == sum(map(prod, shapes.values()))
    assert model.norm_weights == sum(prod(s) for s in shapes.values() if len(s) == 1)
    read = [s for name, s in shapes.items() if len(s) == 2 and name != "embed_tokens"]
    assert model.matrix_weights == sum(map(prod, read))


@pytest.mark.parametrize(
    ("model", "billions"),
    [(roofline.LLAMA_2_7B, 6.74), (roofline.LLAMA_3_8B, 8.03), (roofline.LLAMA_3_70B, 70.55)],
)
def test_published_sizes(model, billions):
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.006)


def test_the_published_bytes_per_token():
    count = roofline.bytes_per_token
    assert count(MISTRAL_7B, weight_bits=32, kv_bits=32, context=4096) == 29_516_398_592
    counted_otherwise = dict(norm_bits=32, whole_embedding=True)
    assert count(MISTRAL_7B, weight_bits=16, kv_bits=16, context=4096, **counted_otherwise) == 15_020_875_776
    assert count(MISTRAL_7B, weight_bits=16, kv_bits=16, context=4096, norm_bits=32) == 14_758_731_776


def test_the_published_limits():
    assert roofline.tokens_per_second(29_516_398_592, 204.8e9) == pytest.approx(6.9, abs=0.05)
    assert roofline.tokens_per_second(15_020_875_776, 204.8e9) == pytest.approx(13.6, abs=0.05)
    assert roofline.tokens_per_second(15_020_875_776, 1008e9) == pytest.approx(67.1, abs=0.05)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_weight_bytes_of_a_small_model_counted_by_hand(bits):
    shapes = shapes_of(SMALL)
    matrices = sum(prod(s) for name, s in shapes.items() if len(s) == 2 and name != "embed_tokens")
    norms, row, table = sum(prod(s) for s in shapes.values() if len(s) == 1), 10, 110
    assert roofline.weight_bytes(SMALL, bits) == (matrices + norms + row) * bits // 8
    assert roofline.weight_bytes(SMALL, bits, norm_bits=32) == (matrices + row) * bits // 8 + norms * 4
    with_table = roofline.weight_bytes(SMALL, bits, whole_embedding=True)
    assert with_table == (matrices + norms + row + table) * bits // 8


@quick
@given(*[st.integers(1, 3)] * 3, st.integers(0, 4), st.integers(1, 3), st.sampled_from([32, 16, 8]))
def test_kv_cache_bytes_counted_one_number_at_a_time(layers, n_kv_heads, head_dim, context, batch, bits):
    model = ModelConfig("any", layers, 8, 8, 4, n_kv_heads, head_dim, 8)
    counted = 0
    for _sequence in range(batch):
        for _layer in range(layers):
            for _key_or_value in "kv":
                for _head in range(n_kv_heads):
                    for _position in range(context):
                        for _dim in range(head_dim):
                            counted += bits // 8
    assert roofline.kv_cache_bytes(model, bits, context, batch) == counted
    read = roofline.weight_bytes(model, 16) + roofline.kv_cache_bytes(model, bits, context)
    assert roofline.bytes_per_token(model, 16, bits, context) == read


def test_kv_cache_at_four_bits():
    assert 2 * roofline.kv_cache_bytes(MISTRAL_7B, 4, 4096) == roofline.kv_cache_bytes(MISTRAL_7B, 8, 4096)


def test_flops_counted_one_multiply_add_at_a_time():
    flops, context = 0, 3
    for name, shape in shapes_of(SMALL).items():
        if len(shape) == 2 and name != "embed_tokens":
            flops += 2 * prod(shape)  # W @ x
    for _layer in range(SMALL.layers):
        for _head in range(SMALL.n_heads):
            for _position in range(context):
                flops += 2 * SMALL.head_dim  # score: q · k
                flops += 2 * SMALL.head_dim  # mix: att * v, added up
    assert roofline.flops_per_token(SMALL, context) == flops


def test_attainable_is_a_slope_and_a_roof():
    assert roofline.attainable(2.0, 10.0, 100.0) == 20
    assert roofline.attainable([0, 1, 9.9, 10, 11, 1e9], 10, 100).tolist() == [0, 10, 99, 100, 100, 100]
    assert roofline.attainable(np.array([1, 2]), 10, 100).tolist() == [10, 20]


# Floors

MAY_IMPORT = {
    "ref": {"ref"},
    "simt": {"simt"},
    "lab": {"lab", "simt"},
    "kernels": {"kernels", "lab"},
    "exercises": {"exercises", "kernels", "lab", "ref", "simt"},
}
ROOMS = {*MAY_IMPORT, "tests", "notebooks", "solutions"}


def imports(source):
    """The first names of all modules that Python source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:  # `from . import x` stays in the room
            found.add(node.module.split(".")[0])
    return found


def upward(room, path):
    """The rooms that a file of this room imports and may not. What measures compares with the references, too."""
    allowed = MAY_IMPORT[room] | ({"ref"} if path.name in ("bench.py", "trials.py") else set())
    return (imports(path.read_text()) & ROOMS) - allowed


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_nothing_imports_upwards(room):
    found = {p.relative_to(ROOT).as_posix(): upward(room, p) for p in sorted((ROOT / room).rglob("*.py"))}
    assert {path: rooms for path, rooms in found.items() if rooms} == {}
    if room in ("ref", "lab", "kernels"):
        assert found


def test_ref_imports_numpy_and_the_standard_library_only():
    for path in (ROOT / "ref").rglob("*.py"):
        assert imports(path.read_text()) <= {"numpy", "ref", *sys.stdlib_module_names}, path.name


def test_an_import_upwards_would_be_seen(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text("import numpy as np, kernels.cpu_gemv\ndef f():\n    from ref.gemv import gemv\n")
    assert upward("lab", planted) == {"kernels", "ref"}
    assert upward("kernels", planted) == {"ref"}
    assert upward("ref", planted) == {"kernels"}
