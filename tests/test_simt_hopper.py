"""mbarriers, bulk copies and wgmma: layouts against NumPy, element by element; faults that must be noticed.

Those marked @truth have also been run on a card (simt_truth/hopper.py): the machine must write the same bits.
"""

import functools
import json
import re
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hopper_kernels import ATTENTION, GEMM, PRELUDE, wgmma

import simt
from simt import nvrtc

try:
    nvrtc.version()
    HERE = True
except simt.CompilerMissing:
    HERE = False
pytestmark = pytest.mark.skipif(not HERE, reason="needs NVRTC")
STORED = json.loads((Path(__file__).parent / "simt_truth" / "h200_hopper.json").read_text())["outputs"]
TRUTH = set()  # names of the tests that have also been run on a card
SWIZZLE_BITS = {0: 0, 128: 1, 64: 2, 32: 3}


card = None  # simt_truth/hopper.py puts a function here that launches on a card
SEEN = []  # of the launches of this test: a checksum of what each wrote


@pytest.fixture(autouse=True)
def known_by_name(request):
    """Random numbers that depend on the test's name only, and the name: what is stored goes by it."""
    global RNG, NAME
    NAME = request.node.name if request.function.__name__ in TRUTH else None
    RNG = np.random.default_rng(zlib.crc32(request.node.name.encode()))
    SEEN.clear()


def truth(function):
    TRUTH.add(function.__name__)
    return function


@functools.cache
def compiled(source, name):
    return simt.compile(source, arch="sm_90a")[name]


def launch(source, name, grid, block, *args, exact=True, **options):
    """Launch, and hold what was written to what a card wrote, where the test is one that was run on a card."""
    if NAME and card:
        return card(NAME, source, name, grid, block, args, options, exact)
    report = compiled(source, name)(grid, block, *args, **options)
    if NAME and exact:
        SEEN.append(checksum(args))
        assert NAME in STORED, "simt_truth/hopper.py has not run this test on a card"
        assert STORED[NAME][len(SEEN) - 1] == SEEN[-1], "an H200 wrote something else"
    return report


def checksum(args):
    """Of all arrays of a launch's arguments, and of those behind tensor maps."""
    arrays = [a.array if isinstance(a, simt.TensorMap) else a for a in args]
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.ascontiguousarray(array).tobytes(), crc) if isinstance(array, np.ndarray) else crc
    return f"{crc:08x}"


def run(body, grid, block, *args, head="", parameters="int* y", **options):
    """A kernel of this body."""
    source = PRELUDE + head + f'\nextern "C" __global__ void k({parameters}) {{\n{body}\n}}'
    return launch(source, "k", grid, block, *args, **options)


def line_of(body, text):
    """For messages: the text of the line that a fault must name."""
    return next(line.strip() for line in body.splitlines() if text in line)


# ---- the whole: TMA, mbarriers, wgmma in a pipeline ----


@truth
@pytest.mark.parametrize(
    ("m", "n", "k", "races"), [(128, 128, 64, True), (256, 128, 320, True), (512, 512, 512, False)]
)
def test_pipelined_matmul(m, n, k, races):
    a, b = (RNG.standard_normal((rows, k)).astype(np.float16) for rows in (m, n))
    c = np.full((m, n), np.nan, np.float32)
    maps = [simt.TensorMap(x, (128, 64), swizzle=128) for x in (a, b)]
    start = time.process_time()
    report = launch(
        GEMM, "gemm", (n // 128, m // 128), 288, *maps, c, np.int32(n), np.int32(k), shared=3 * 2**15, check_races=races
    )
    assert time.process_time() - start < 20  # about 2 s for 512: it is to stay usable
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    scale = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64).T
    assert (np.abs(c - exact) <= 2.0**-22 * k / 16 * scale).all()
    tiles = (m // 128) * (n // 128) * (k // 64)
    assert report.counters["simt__bulk_load_bytes.sum"] == tiles * 2**15
    assert report.counters["simt__wgmma.sum"] == tiles * 2 * 4
    wgmma_line = next(i for i, line in enumerate(GEMM.splitlines(), 1) if "wgmma.mma_async" in line)
    assert any("simt__wgmma.sum" in c for line, c in report.lines.items() if abs(line - wgmma_line) < 60)


@truth
def test_edges_of_the_matmul_are_zeros():
    """Boxes that hang over the edge of A and B: 100 rows, 90 columns, 70 of k."""
    a, b = RNG.integers(-3, 4, (100, 72)).astype(np.float16), RNG.integers(-3, 4, (90, 72)).astype(np.float16)
    c = np.full((128, 128), np.nan, np.float32)
    maps = [simt.TensorMap(x[:, :70], (128, 64), swizzle=128) for x in (a, b)]
    launch(GEMM, "gemm", 1, 288, *maps, c, np.int32(128), np.int32(128), shared=3 * 2**15)
    assert (c[:100, :90] == a[:, :70].astype(np.float32) @ b[:, :70].astype(np.float32).T).all()
    assert (c[100:] == 0).all() and (c[:, 90:] == 0).all()


def test_a_place_given_back_before_it_is_read():
    """With races looked for: the result of this run may even be right."""
    wait, early = "    wait(&full[s], i / STAGES % 2);\n", "    if (threadIdx.x % 32 == 0) arrive(&empty[s]);"
    late = next(line for line in GEMM.splitlines() if line.startswith(early))
    source = GEMM.replace(late, "").replace(wait, wait + early + "\n")
    a = RNG.standard_normal((128, 640)).astype(np.float16)
    map, c = simt.TensorMap(a, (128, 64), swizzle=128), np.zeros((128, 128), np.float32)
    kernel = simt.compile(source, arch="sm_90a")["gemm"]
    with pytest.raises((simt.RaceError, simt.AsyncFault)):
        kernel(1, 288, map, map, c, np.int32(128), np.int32(640), shared=3 * 2**15, check_races=True)


@truth
@pytest.mark.parametrize("races", [False, True])
def test_warpgroups_at_different_places(races):
    """Some warpgroups of some blocks add a step twice, by instructions that the others do not come to."""
    twice = """    wgmma_commit();
    if (warpgroup == (i + blockIdx.x) % 2) {
      for (int j = 0; j < STEP; j += 16)
        wgmma(d, descriptor(tile + warpgroup * 64 * STEP * 2 + j * 2, 0, 1024, 1),
              descriptor(tile + HALF + j * 2, 0, 1024, 1), 1);
      wgmma_commit();
    }
"""
    source = GEMM.replace("    wgmma_commit();\n", twice)
    a, b = (RNG.integers(-2, 3, (256, 256)).astype(np.float16) for _ in range(2))
    c = np.full((256, 256), np.nan, np.float32)
    maps = [simt.TensorMap(x, (128, 64), swizzle=128) for x in (a, b)]
    launch(source, "gemm", (2, 2), 288, *maps, c, np.int32(256), np.int32(256), shared=3 * 2**15, check_races=races)
    right = np.zeros((4, 64, 2, 128))
    rows, columns = a.reshape(4, 64, 4, 64).astype(float), b.reshape(2, 128, 4, 64).astype(float)
    for group, x, i in np.ndindex(4, 2, 4):
        right[group, :, x] += (1 + (group % 2 == (i + x) % 2)) * rows[group, :, i] @ columns[x, :, i].T
    assert (c.reshape(4, 64, 2, 128) == right).all()


MUTANTS = {
    "no wait for the tile": (("    wait(&full[s], i / STAGES % 2);\n", ""), simt.MemoryFault, "been seen to arrive"),
    "no wait for the place": (("wait(&empty[s], i / STAGES % 2 ^ 1);", ""), simt.AsyncFault, "goes too, which nobody"),
    "the consumer's parity": (("wait(&full[s], i / STAGES % 2)", "wait(&full[s], 0)"), simt.Deadlock, "lacks 8 of 8"),
    "the producer's parity": (("STAGES % 2 ^ 1", "STAGES % 2"), simt.Deadlock, "lacks 8 of 8 arrivals"),
    "no wait for wgmma": (("    wgmma_wait();\n", ""), simt.AsyncFault, "wgmma of line .* still"),
    "a place given back too early": (
        ("    wgmma_commit();\n    wgmma_wait();\n    if (threadIdx.x % 32 == 0) arrive(&empty[s]);",
         "    if (threadIdx.x % 32 == 0) arrive(&empty[s]);\n    wait(&full[(s + 1) % STAGES], (i + 1) / STAGES % 2);\n"
         "    wait(&full[(s + 2) % STAGES], (i + 2) / STAGES % 2);\n    wait(&full[s], (i + 3) / STAGES % 2);\n"
         "    wgmma_commit();\n    wgmma_wait();"),
        simt.AsyncFault, "which the wgmma of line .* still reads",
    ),
    "a place never given back": ((" arrive(&empty[s]);", ";"), simt.Deadlock, "lacks 8 of 8 arrivals"),
    "too few bytes announced": (("2 * HALF);\n      load2", "HALF);\n      load2"), simt.MemoryFault, "been seen to"),
    "too many bytes announced": (("2 * HALF);\n      load2", "3 * HALF);\n      load2"), simt.Deadlock, "16384 bytes"),
    "no commit": (("    wgmma_commit();\n", ""), simt.AsyncFault, "wgmma of line .* still"),
    "tiles out of line": (("load2(tiles + s", "load2(tiles + 128 + s"), simt.MemoryFault, "multiple of 1024"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_in_the_pipeline_are_noticed(name):
    (old, new), error, text = MUTANTS[name]
    assert old in GEMM
    a = RNG.standard_normal((128, 640)).astype(np.float16)
    map, c = simt.TensorMap(a, (128, 64), swizzle=128), np.zeros((128, 128), np.float32)
    kernel = simt.compile(GEMM.replace(old, new), arch="sm_90a")["gemm"]
    with pytest.raises(error, match=text):
        kernel(1, 288, map, map, c, np.int32(128), np.int32(640), shared=3 * 2**15)


@truth
@pytest.mark.parametrize("rows", [230, 1000])
def test_attention(rows):
    """exp2f's last bits differ from the card's, and so may the result's."""
    q, k, v = (RNG.standard_normal((rows, 64)).astype(np.float16) for _ in range(3))
    o = np.full((rows, 64), np.nan, np.float16)
    maps = [simt.TensorMap(x, (64, 64), swizzle=128) for x in (q, k, v, o)]
    for races in (False, True) if rows < 300 else (False,):
        launch(ATTENTION, "attention", -(-rows // 64), 160, *maps, exact=False, shared=5 * 8192, check_races=races)
        p = np.exp2(q.astype(np.float64) @ k.astype(np.float64).T / 8) * np.tri(rows)
        right = p @ v.astype(np.float64) / p.sum(axis=1, keepdims=True)
        assert np.abs(o - right).max() < 2e-3


ATTENTION_MISTAKES = {
    "the other warps may still read Q": (
        'asm volatile("bar.sync 1, 128;" ::: "memory");',
        "wgmma.* writes it at line",
    ),
    "the other warps may not have written O": (
        'asm volatile("bar.sync 2, 128;" ::: "memory");',
        "there is no __sync",
    ),
    "no proxy fence": ("  proxy_fence();\n", "fence.proxy.async is missing"),
}


@pytest.mark.parametrize("mistake", ATTENTION_MISTAKES)
def test_races_of_attention(mistake):
    missing, text = ATTENTION_MISTAKES[mistake]
    assert missing in ATTENTION
    kernel = simt.compile(ATTENTION.replace(missing, ""), arch="sm_90a")["attention"]
    maps = [simt.TensorMap(RNG.standard_normal((230, 64)).astype(np.float16), (64, 64), swizzle=128) for _ in range(4)]
    with pytest.raises(simt.RaceError, match=text):
        kernel(4, 160, *maps, shared=5 * 8192, check_races=True)


# ---- wgmma: where each element lies ----


def element(row, k, item, swizzle, leading, stride, k_major):
    """The byte of element (row, k) of an operand, written out from the ISA's canonical layouts; the start is 0."""
    bits = 16 // item  # elements in 16 bytes
    if k_major:
        row_group, row_in, chunk, inside = row // 8, row % 8, k // bits, k % bits * item
        if swizzle:
            byte = row_group * stride + row_in * swizzle + chunk * 16 + inside
        else:
            byte = row_group * stride + row_in * 16 + chunk * leading + inside
    else:
        across = max(swizzle, 16) // item  # rows side by side
        atom, row_in, k_group, k_in = row // across, row % across, k // 8, k % 8
        if swizzle:
            byte = atom * leading + row_in * item + k_in * swizzle + k_group * stride
        else:
            byte = atom * stride + row_in * item + k_in * 16 + k_group * leading
    exchange = {0: 0, 32: byte >> 7 & 1, 64: byte >> 7 & 3, 128: byte >> 7 & 7}[swizzle]
    return byte ^ exchange << 4


def image(matrix, swizzle, k_major, leading, stride, size):
    """Shared memory that holds a matrix (rows, k) given as bits."""
    item = matrix.dtype.itemsize
    out = np.zeros(size, np.uint8)
    for (row, k), value in np.ndenumerate(matrix):
        at = element(row, k, item, swizzle, leading, stride, k_major)
        out[at : at + item] = np.frombuffer(value.tobytes(), np.uint8)
    return out


def strides_of(rows, swizzle, k_major, spread):
    """(leading, stride) that leave no two elements on one byte; `spread`: with gaps between the groups."""
    if k_major:
        if swizzle:
            return 16, 8 * swizzle * spread  # leading is not looked at
        return 128 * (rows // 8) * spread, 128  # the halves of K apart, groups of rows side by side
    if swizzle:
        group = 8 * swizzle  # 8 k of one atom; the second 8 k behind it
        return 2 * group * spread, group
    return 128 * spread, 256 * spread


def bits_of(x, kind):
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    word = x.astype(np.float32).view(np.uint32)
    return word if kind == "tf32" else (word >> 16).astype(np.uint16)


def accumulator(d, n, group=0):
    """Registers (threads, registers) of f32 or, as pairs, f16 -> (64, N), by the ISA's picture of the fragment."""
    out = np.zeros((64, n), np.float64)
    pairs = d.shape[1] == n // 4
    for thread in range(128):
        for i in range(n // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
            value = d[thread].view(np.float16)[i] if pairs else d[thread, i]
            out[row, column] = value
    return out


def multiply(n, kind="f16", d="f32", a_layout=(128, True), b_layout=(128, True), spread=1, signs=(1, 1), old=None,
             from_registers=False, draw=None):  # fmt: skip
    """Run one wgmma on random small numbers, or on draw(shape); -> (what it gave, what is right)."""
    k = 8 if kind == "tf32" else 16
    draw = draw or (lambda shape: RNG.integers(-4, 5, shape))
    a, b = draw((64, k)), draw((n, k))
    leads = [strides_of(rows, *layout, spread) for rows, layout in ((64, a_layout), (n, b_layout))]
    size = 65536
    images = [
        image(bits_of(x, kind), s, m, *lead, size) for x, (s, m), lead in zip((a, b), (a_layout, b_layout), leads)
    ]
    count = n // (2 if d == "f32" else 4)
    type_ = "float" if d == "f32" else "unsigned"
    lead = [f"{x}, {y}, {SWIZZLE_BITS[s]}" for (x, y), (s, _) in zip(leads, (a_layout, b_layout))]
    fragments = np.zeros((128, 4), np.uint32)
    if from_registers:
        words = bits_of(a, kind).view(np.uint32)  # (64, 8): two f16 or one tf32 each
        for t in range(128):
            row, q = t // 32 * 16 + t % 32 // 4, t % 4
            fragments[t] = words[row, q], words[row + 8, q], words[row, q + 4], words[row + 8, q + 4]
    given = "unsigned a[4]; for (int i = 0; i < 4; i++) a[i] = fragments[threadIdx.x * 4 + i];"
    body = f"""
    extern __shared__ __align__(1024) unsigned char s[];
    for (int i = threadIdx.x; i < {2 * size // 16}; i += 128) ((uint4*)s)[i] = ((const uint4*)images)[i];
    proxy_fence();
    __syncthreads();
    {type_} d[{count}];
    for (int i = 0; i < {count}; i++) d[i] = {"0" if old is None else "old[threadIdx.x * " + str(count) + " + i]"};
    {given if from_registers else f"u64 a = descriptor(at(s), {lead[0]});"}
    wgmma_fence();
    wgmma(d, a, descriptor(at(s) + {size}, {lead[1]}), {int(old is not None)});
    wgmma_commit();
    wgmma_wait();
    for (int i = 0; i < {count}; i++) out[threadIdx.x * {count} + i] = d[i];
    """
    out = np.zeros((128, count), np.float32 if d == "f32" else np.uint32)
    before = np.zeros_like(out) if old is None else old
    trans = tuple(int(not m) for _, m in (a_layout, b_layout))
    head = wgmma(n, d, kind, from_registers, signs, trans)
    parameters = f"const void* images, const unsigned* fragments, const {type_}* old, {type_}* out"
    run(body, 1, 128, np.concatenate(images), fragments, before, out, head=head, parameters=parameters,
        shared=2 * size, check_races=True)  # fmt: skip
    right = signs[0] * signs[1] * (a @ b.T) + accumulator(before, n)
    return accumulator(out, n), right


LAYOUTS = [(s, k_major) for s in (0, 32, 64, 128) for k_major in (True, False)]


@truth
@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a(layout, spread):
    found, right = multiply(8, a_layout=layout, spread=spread)
    assert (found == right).all()


@truth
@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_b(layout, spread):
    for n in (64, 128) if layout[1] else (64, 256 // spread):  # several atoms side by side
        found, right = multiply(n, kind="bf16", b_layout=layout, spread=spread)
        assert (found == right).all()


@truth
@pytest.mark.parametrize("n", [8, 24, 96, 200, 256])
def test_every_width(n):
    found, right = multiply(n, a_layout=(32, True), b_layout=(64, True))
    assert (found == right).all()


@truth
@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
def test_a_from_registers(kind):
    old = RNG.integers(-9, 9, (128, 16)).astype(np.float32)
    found, right = multiply(32, kind, b_layout=(32, True), from_registers=True, old=old)
    assert (found == right).all()


@truth
def test_tf32_and_signs():
    found, right = multiply(16, "tf32", a_layout=(0, True), b_layout=(32, True), signs=(1, -1))
    assert (found == right).all() and (found != 0).any()
    found, right = multiply(16, signs=(-1, -1), old=np.ones((128, 8), np.float32))
    assert (found == right).all()


@truth
def test_half_accumulators():
    old = RNG.integers(-9, 9, (128, 12)).astype(np.float16).view(np.uint32)
    found, right = multiply(24, d="f16", old=old)
    assert (found == right).all()


@truth
@pytest.mark.parametrize("spread", [0, 3, 7])
@pytest.mark.parametrize(("kind", "d"), [("f16", "f32"), ("f16", "f16"), ("bf16", "f32"), ("tf32", "f32")])
def test_sums_that_lose_bits(kind, d, spread):
    """Operands and accumulators of all sizes; the bits of the sums are the card's."""
    with np.errstate(over="ignore"):
        old = RNG.standard_normal((128, 16)) * 4.0**spread
        old = old.astype(np.float32) if d == "f32" else old.astype(np.float16).view(np.uint32)

        def draw(shape):
            return RNG.standard_normal(shape) * 2.0 ** RNG.integers(-spread, spread + 1, shape)

        found, right = multiply(32, kind, d=d, a_layout=(32, True), b_layout=(32, True), old=old, draw=draw)
        bits = {"f16": 2.0**-10, "bf16": 2.0**-7, "tf32": 2.0**-9}[kind]
        assert not np.isfinite(found).all() or (np.abs(found - right) < 4 * bits * np.abs(right).max()).all()


def test_sums_are_those_of_mma():
    """wgmma adds as mma.sync does: all products of one instruction at once."""
    from simt.arithmetic.mma import LOWEST, _product, accumulate

    left, right, c = (
        RNG.standard_normal(s) * 10.0 ** RNG.integers(-3, 3, s) for s in ((3, 64, 16), (3, 24, 16), (3, 64, 24))
    )
    left, right = (x.astype(np.float16).astype(np.float64) for x in (left, right))
    c = c.astype(np.float32).astype(np.float64)
    left[0, :2], c[1, 0] = 0, 0
    left[2, 5, 3], left[2, 6, 1], c[2, 9] = np.inf, np.nan, np.inf
    for half in (False, True):
        with np.errstate(all="ignore"):
            found, wanted = (f(left, right, c, LOWEST["f16"], half) for f in (accumulate, _product))
        assert np.array_equal(found, wanted, equal_nan=True) and np.isnan(found).any()


# ---- wgmma: faults ----

STEP = """
    extern __shared__ __align__(1024) unsigned char s[];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) ((uint4*)s)[i] = make_uint4(0, 0, 0, 0);
    proxy_fence();
    __syncthreads();
    float d[4] = {0, 0, 0, 0};
    u64 a = descriptor(at(s), 0, 1024, 1), b = descriptor(at(s) + 8192, 0, 1024, 1);
    wgmma_fence();
    wgmma(d, a, b, 1);
    wgmma_commit();
    wgmma_wait();
    y[threadIdx.x] = d[0] + d[3];
"""


def step(*changes, block=128, **options):
    body = STEP
    for old, new in changes:
        assert old in body
        body = body.replace(old, new, 1)
    y = np.zeros(1024, np.float32)
    run(body, 2, block, y, head=wgmma(8), parameters="float* y", shared=16384, **options)
    return y


def test_a_right_step_passes():
    for races in (False, True):
        assert (step(check_races=races) == 0).all()
        assert (step(block=256, check_races=races) == 0).all()


def test_a_missing_wait_is_noticed():
    with pytest.raises(
        simt.AsyncFault, match=r"reads a register that the wgmma of line .* still writes.*thread \(0, 0, 0\)"
    ):
        step(("    wgmma_wait();\n", ""))
    with pytest.raises(simt.AsyncFault, match="no wgmma.wait_group"):
        step(("    wgmma_commit();\n", ""))  # a wait completes what has been committed
    two = (
        "wgmma(d, a, b, 1);\n",
        "wgmma(d, a, b, 1); wgmma_commit();\n float e[4] = {1, 1, 1, 1}; wgmma(e, a, b, 1);\n",
    )
    one_left = ("wgmma_wait();", 'asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");')
    assert (step(two, one_left) == 0).all()  # the first group's result
    with pytest.raises(simt.AsyncFault, match="still writes"):
        step(two, one_left, ("d[0] + d[3]", "d[0] + e[3]"))


def test_moves_of_accumulators_are_no_reads():
    """A loop moves the registers from round to round before they are waited for."""
    loop = (
        "    wgmma(d, a, b, 1);\n    wgmma_commit();\n",
        "for (int i = 0; i < n; i++) { wgmma(d, a, b, i > 0); wgmma_commit(); }\n",
    )
    y = np.zeros(256, np.float32)
    body = STEP.replace(*loop).replace(
        "make_uint4(0, 0, 0, 0)", "make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00)"
    )
    body = body.replace("wgmma_fence();", "if (threadIdx.x >= 128) return;\n wgmma_fence();")  # a masked form
    run(body, 1, 256, y, np.int32(5), head=wgmma(8), parameters="float* y, int n", shared=16384)
    assert (y[:128] == 2 * 5 * 16).all()  # ones times ones, five times


def test_parts_of_a_warpgroup_cannot_multiply():
    with pytest.raises(simt.LaneFault, match="whole warpgroups.*has 64 here"):
        step(block=64)
    with pytest.raises(simt.LaneFault, match="four warps of a warpgroup"):
        step(("    wgmma_fence();", "    if (threadIdx.x < 32) __syncthreads();\n    wgmma_fence();"))
    for name, ptx in (("wait", "wait_group"), ("commit", "commit_group"), ("fence", "fence")):
        with pytest.raises(simt.LaneFault, match=f"wgmma.{ptx} is for all threads.*, warp 0 has 1 lanes here"):
            step((f"    wgmma_{name}();", f"    if (threadIdx.x == 0) wgmma_{name}();"))


def test_a_fence_before_the_first_wgmma():
    with pytest.raises(simt.AsyncFault, match="before the first wgmma.fence"):
        step(("    wgmma_fence();\n", ""))


def test_wgmma_reads_what_is_there():
    with pytest.raises(simt.MemoryFault, match=r"wgmma reads byte 8192 .* for B, to which nothing has been written"):
        step(("i < 1024;", "i < 512;"))
    with pytest.raises(simt.MemoryFault, match="for A, to which"):
        step(("i = threadIdx.x;", "i = threadIdx.x + 512;"))
    with pytest.raises(
        simt.MemoryFault, match=r"descriptor of B leads to byte 17392 of shared memory, but a block has 16384"
    ):
        step(("at(s) + 8192", "at(s) + 16384"))
    with pytest.raises(simt.Unsupported, match="base offset"):
        step(("at(s) + 8192, 0, 1024, 1)", "at(s) + 8192, 0, 1024, 1) | 1ull << 49"))
    with pytest.raises(simt.AsyncFault, match="different descriptors of A"):
        step(("a = descriptor(at(s)", "a = descriptor(at(s) + threadIdx.x / 32 % 2 * 1024"))


def test_races_with_wgmma():
    for missing in ("    proxy_fence();\n", "    __syncthreads();\n"):
        assert (step((missing, "")) == 0).all()
        need = "fence.proxy.async is missing" if "proxy" in missing else "no __syncthreads"
        with pytest.raises(simt.RaceError, match=need):
            step((missing, ""), check_races=True)
    late = ("    wgmma_commit();\n", "    ((int*)s)[threadIdx.x] = 1;\n    wgmma_commit();\n")
    with pytest.raises(simt.RaceError, match=r"writes it at line .*, while the wgmma of line .* still reads it"):
        step(late, check_races=True)
    after = ("    wgmma_wait();\n", "    wgmma_wait();\n    __syncthreads();\n    ((int*)s)[threadIdx.x] = 1;\n")
    step(after, check_races=True)
    with pytest.raises(
        simt.RaceError, match=r"reads it at line .*wgmma.*writes it at line"
    ):  # other warps may still read
        step((after[0], after[1].replace("__syncthreads();", "")), check_races=True)


# ---- tensor maps ----

LOAD = """
    extern __shared__ __align__(1024) unsigned char s[];
    __shared__ u64 bar;
    if (threadIdx.x == 0) init(&bar, 1);
    __syncthreads();
    if (threadIdx.x == 0) { expect(&bar, bytes); COPY }
    wait(&bar, 0);
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) y[i] = ((int*)s)[i];
"""


def copy_box(map, coordinates, dtype, check_races=True):
    """The bytes that a box brings to shared memory."""
    rank = len(coordinates)
    names = ", ".join(f"%{i + 3}" for i in range(rank))
    copy = (
        f'asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint'
        f' [%0], [%1, {{{names}}}], [%2], %{rank + 3};" :: "r"(at(s)), "l"(&map), "r"(at(&bar)), '
        + ", ".join(f'"r"({c})' for c in coordinates)
        + ', "l"(0ull) : "memory");'
    )
    y = np.full(map.size // 4, -1, np.int32)
    parameters = "const __grid_constant__ CUtensorMap map, int* y, int bytes"
    run(LOAD.replace("COPY", copy), 1, 64, map, y, np.int32(map.size), parameters=parameters, shared=map.size,
        check_races=check_races)  # fmt: skip
    return y.view(dtype)


@truth
@pytest.mark.parametrize(
    ("shape", "box", "start", "dtype"),
    [
        ((1000,), (64,), (40,), np.float32),
        ((40, 32), (16, 8), (-3, 28), np.float64),  # hangs over two edges
        ((40, 64), (8, 64), (36, 0), np.float16),
        ((5, 6, 32), (2, 3, 16), (4, -1, 16), np.int16),
        ((2, 3, 4, 16), (2, 2, 2, 16), (-1, 2, 3, 0), np.uint8),
        ((2, 3, 4, 64), (2, 2, 2, 64), (-1, 2, 3, -16), np.uint8),
        ((2, 3, 2, 3, 8), (1, 2, 1, 2, 8), (1, 1, 0, 2, 4), np.uint32),
        ((4, 16), (4, 16), (9, 8), np.float32),  # all of it outside
        ((4, 16), (2, 8), (-2, -8), np.float32),
    ],
)
def test_boxes_of_every_rank(shape, box, start, dtype):
    array = (RNG.integers(1, 100, shape)).astype(dtype)
    got = copy_box(simt.TensorMap(array, box), start[::-1], dtype).reshape(box)
    right = np.zeros(box, dtype)
    for at in np.ndindex(*box):
        where = tuple(s + i for s, i in zip(start, at))
        if all(0 <= w < n for w, n in zip(where, shape)):
            right[at] = array[where]
    assert (got == right).all()


@pytest.mark.parametrize(("dtype", "column"), [(np.uint8, 8), (np.float16, 1), (np.float32, -2), (np.float64, 3)])
def test_boxes_begin_at_multiples_of_16_bytes(dtype, column):
    map = simt.TensorMap(np.zeros((8, 64), dtype), (4, 16))
    size = np.dtype(dtype).itemsize
    with pytest.raises(simt.AsyncFault, match=rf"\{{{column}, 3\}} .* the first, {column} elements of {size} bytes"):
        copy_box(map, (column, 3), dtype)


@truth
@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("rows", [8, 24])
def test_swizzles(swizzle, rows):
    array = RNG.integers(0, 60000, (64, 128)).astype(np.uint16)
    columns = swizzle // 2
    got = copy_box(simt.TensorMap(array, (rows, columns), swizzle=swizzle), (16, 5), np.uint16)
    for row in range(rows):
        for column in range(columns):
            byte = row * swizzle + column * 2
            phase = {32: row // 4 % 2, 64: row // 2 % 4, 128: row % 8}[swizzle]  # so the pictures of the guide
            chunk, inside = divmod(byte % swizzle, 16)
            place = row * swizzle + (chunk ^ phase) * 16 + inside
            assert got[place // 2] == array[5 + row, 16 + column]


@truth
def test_strided_arrays():
    array = RNG.integers(1, 100, (6, 10, 32)).astype(np.int32)
    part = array[1:, ::2, 4:20]
    got = copy_box(simt.TensorMap(part, (5, 5, 16)), (0, 0, 0), np.int32)
    assert (got.reshape(5, 5, 16) == part).all()


STORE = """
    extern __shared__ __align__(1024) unsigned char s[];
    for (int i = threadIdx.x; i < 8 * 64; i += blockDim.x) ((unsigned short*)s)[i] = i + 1;
    proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
      store2(&map, 32, blockIdx.x * 8 + 4, s);
      commit_stores();
      wait_stores();
    }
"""


def store(*changes, swizzle=128, **options):
    body = STORE
    for old, new in changes:
        assert old in body
        body = body.replace(old, new, 1)
    array = np.zeros((26, 80), np.uint16)
    map = simt.TensorMap(array, (8, 64), swizzle=swizzle)
    report = run(body, 3, 96, map, parameters="const __grid_constant__ CUtensorMap map", shared=8192, **options)
    return array, report


@truth
def test_stores_through_a_map():
    array, report = store(check_races=True)
    right = np.zeros((28, 96), np.uint16)
    for block in range(3):
        for row in range(8):
            for chunk in range(8):
                held = 1 + row * 64 + (chunk ^ row) * 8 + np.arange(8)
                right[block * 8 + 4 + row, 32 + chunk * 8 : 40 + chunk * 8] = held
    assert (array == right[:26, :80]).all()
    assert report.counters["simt__bulk_store_bytes.sum"] == 3 * 1024
    assert (store(("wait_stores()", "wait_stores_read()"))[0] == array).all()


def test_faults_of_stores():
    for missing in ("wait_stores();", "commit_stores();"):
        with pytest.raises(simt.AsyncFault, match=r"the thread ends and has not waited.*thread \(0, 0, 0\)"):
            store((missing, ""))
    with pytest.raises(simt.MemoryFault, match="to which nothing has been written"):
        store(("i < 8 * 64", "i < 8 * 63"))
    with pytest.raises(simt.MemoryFault, match="must start at a multiple of 1024"):
        store((", s);", ", s + 512);"))
    with pytest.raises(simt.AsyncFault, match=r"coordinates \{32, -4\}: a store's may not be negative"):
        store(("* 8 + 4", "* 8 - 4"))
    with pytest.raises(simt.AsyncFault, match=r"coordinates \{-32, 4\}: a store's may not be negative"):
        store(("map, 32", "map, -32"))
    with pytest.raises(simt.AsyncFault, match=r"\{36, 4\} of a tensor map: the first, 36 elements of 2 bytes, must be"):
        store(("map, 32", "map, 36"))
    for missing, need in (("proxy_fence();", "fence.proxy.async is missing"), ("__syncthreads();", "no __syncwarp")):
        with pytest.raises(simt.RaceError, match=need):
            store((missing, ""), check_races=True)
    early = ("wait_stores();", "s[0] = 1; wait_stores();")
    with pytest.raises(simt.RaceError, match="while the bulk store of line .* still reads it"):
        store(early, check_races=True)
    store(("wait_stores();", "wait_stores_read(); s[0] = 1;"), check_races=True)
    others = "wait_stores_read(); } BARRIER s[2 * threadIdx.x] = 1; if (0) {"
    store(("wait_stores();", others.replace("BARRIER", "__syncthreads();")), check_races=True)
    with pytest.raises(simt.RaceError, match="thread .* writes it at line"):
        store(("wait_stores();", others.replace("BARRIER", "")), check_races=True)


def test_arguments_of_a_tensor_map():
    a = np.zeros((32, 64), np.float16)
    for error, text, make in [
        (TypeError, "array: expected a NumPy array", lambda: simt.TensorMap([1], (1,))),
        (ValueError, "array: expected 1 to 5 axes", lambda: simt.TensorMap(np.zeros((1,) * 6), (1,) * 6)),
        (ValueError, "array: expected numbers", lambda: simt.TensorMap(np.zeros(8, complex), (8,))),
        (ValueError, "array: expected at least one", lambda: simt.TensorMap(a[:0], (8, 64))),
        (ValueError, "array: expected a dense last axis", lambda: simt.TensorMap(a[:, ::2], (8, 8))),
        (ValueError, "array: expected strides .* axis 0 has 2", lambda: simt.TensorMap(a.T[:, :1], (8, 8))),
        (ValueError, "box: expected 2 numbers", lambda: simt.TensorMap(a, (8,))),
        (ValueError, "box: expected 1 to 256", lambda: simt.TensorMap(a, (257, 8))),
        (ValueError, "box: expected a last axis .* got 14", lambda: simt.TensorMap(a, (8, 7))),
        (ValueError, "swizzle: expected one of", lambda: simt.TensorMap(a, (8, 64), swizzle=256)),
        (ValueError, "swizzle: with 128 bytes", lambda: simt.TensorMap(a, (8, 32), swizzle=128)),
    ]:
        with pytest.raises(error, match=text):
            make()
    map = simt.TensorMap(a, (8, 64))
    with pytest.raises(simt.LaunchError, match="y: expected an array.*got a TensorMap"):
        run("y[0] = 1;", 1, 1, map)
    with pytest.raises(
        simt.LaunchError, match="map: expected a struct of 128 bytes, such as a simt.TensorMap; got ndarray|map: "
    ):
        run("", 1, 1, a, parameters="const __grid_constant__ CUtensorMap map")
    with pytest.raises(simt.Unsupported, match="no __grid_constant__ parameter"):
        copy = LOAD.replace("COPY", "load2(s, (const CUtensorMap*)y, 0, 0, &bar);")
        run(copy, 1, 32, np.zeros(64, np.int32), np.int32(64), parameters="int* y, int bytes", shared=64)
    with pytest.raises(simt.AsyncFault, match="2 coordinates for the tensor map of an array with 3 axes"):
        copy_box_2 = LOAD.replace("COPY", "load2(s, &map, 0, 0, &bar);")
        cube = simt.TensorMap(np.zeros((4, 4, 16), np.int32), (1, 4, 16))
        parameters = "const __grid_constant__ CUtensorMap map, int* y, int bytes"
        run(copy_box_2, 1, 32, cube, np.zeros(64, np.int32), np.int32(256), parameters=parameters, shared=256)


# ---- bulk copies of lines ----

LINE = """
    extern __shared__ __align__(128) unsigned char s[];
    __shared__ u64 bar;
    if (threadIdx.x == 0) init(&bar, 1);
    __syncthreads();
    if (threadIdx.x == 0) { expect(&bar, 256); load_line(s, x + blockIdx.x * 64, 256, &bar); }
    wait(&bar, 0);
    int v = ((int*)s)[threadIdx.x];
    __syncthreads();
    ((int*)s)[63 - threadIdx.x] = v;
    proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) { store_line(y + blockIdx.x * 64, s, 256); commit_stores(); wait_stores(); }
"""


def line(*changes, **options):
    body = LINE
    for old, new in changes:
        assert old in body
        body = body.replace(old, new, 1)
    x, y = np.arange(5 * 64, dtype=np.int32), np.zeros(5 * 64, np.int32)
    report = run(body, 5, 64, x, y, parameters="const int* x, int* y", shared=512, **options)
    return y.reshape(5, 64), report


@truth
def test_lines():
    for races in (False, True):
        y, report = line(check_races=races)
        assert (y == np.arange(320).reshape(5, 64)[:, ::-1]).all()
    assert report.counters["simt__bulk_load_bytes.sum"] == report.counters["simt__bulk_store_bytes.sum"] == 5 * 256


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (("load_line(s,", "load_line(s + 8,"), simt.MemoryFault, "shared memory; it must start at a multiple of 16"),
        (("x + blockIdx.x * 64", "x + 1"), simt.MemoryFault, "of global memory; it must be a multiple of 16"),
        (("* 64, 256, &bar", "* 64, 248, &bar"), simt.AsyncFault, "248 bytes; it must be a multiple of 16"),
        (("* 64, 256, &bar", "* 64, 0, &bar"), simt.AsyncFault, "0 bytes"),
        (("x + blockIdx.x * 64", "x + 300"), simt.MemoryFault, r"bulk copy reads .*x\[300\].*x has 320 elements"),
        (("y + blockIdx.x * 64, s", "y + 316, s"), simt.MemoryFault, "bulk copy writes"),
        (("load_line(s,", "load_line(s + 384,"), simt.MemoryFault, "but a block has"),
        (
            ("    wait(&bar, 0);\n", ""),
            simt.MemoryFault,
            "an asynchronous copy may not have arrived: nothing has waited",
        ),
        (("    wait(&bar, 0);\n", "    complete(&bar, 1);\n"), simt.MemoryFault, "may not have arrived"),
        (
            ("&bar); }", "&bar); load_line(s + 128, x, 128, &bar); }"),
            simt.AsyncFault,
            "where the copy of line .* goes too",
        ),
    ],
)
def test_faults_of_lines(change, error, text):
    with pytest.raises(error, match=text) as caught:
        line(change)
    assert "thread (0, 0, 0)" in str(caught.value) and "block (0, 0, 0)" in str(caught.value)


def test_a_copy_may_not_overwrite_what_wgmma_reads():
    again = (
        "    wgmma_commit();\n",
        "    wgmma_commit();\n"
        "    if (threadIdx.x == 0) { init(&bar, 1); expect(&bar, 64); load_line(s + 8208, x, 64, &bar); }\n",
    )
    body = ("    float d[4]", "    __shared__ u64 bar; const float* x = y;\n    float d[4]")
    with pytest.raises(simt.AsyncFault, match="which the wgmma of line .* still reads"):
        step(again, body)
    after = ("    wgmma_commit();\n", "    wgmma_commit();\n    wgmma_wait();\n" + again[1].partition("\n")[2])
    seen = ("    y[threadIdx.x] =", "    wait(&bar, 0);\n    y[threadIdx.x] =")
    step(after, body, seen)
    beside = (again[0], again[1].replace("8208", "8192 + 1024"))  # not what it reads
    step(beside, body, seen)
    with pytest.raises(simt.AsyncFault, match="the block ends and nobody has waited for this bulk load"):
        step(beside, body)


# ---- mbarriers ----


def phases(body, block=64, grid=1, **options):
    y = np.zeros(1024, np.int32)
    head = "    __shared__ u64 bar;\n    if (threadIdx.x == 0) init(&bar, 32);\n    __syncthreads();\n"
    run(head + body, grid, block, y, **options)
    return y


@truth
def test_phases_and_parity():
    y = phases("""
    if (threadIdx.x < 31) arrive(&bar);
    __syncthreads();
    if (threadIdx.x == 0) { y[0] = complete(&bar, 0); y[1] = complete(&bar, 1); }  // the phase before it
    __syncthreads();
    if (threadIdx.x == 40) arrive(&bar);
    __syncthreads();
    if (threadIdx.x == 0) { y[2] = complete(&bar, 0); y[3] = complete(&bar, 1); }
    __syncthreads();
    arrive(&bar);  // 64: two more phases
    __syncthreads();
    if (threadIdx.x == 0) { y[4] = complete(&bar, 0); y[5] = complete(&bar, 1); }
    """)
    assert y[:6].tolist() == [0, 1, 1, 0, 1, 0]


@truth
def test_tokens():
    y = phases("""
    u64 token;
    if (threadIdx.x < 32) {
      asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(at(&bar)) : "memory");
      __syncwarp();
      unsigned done;
      asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                   : "=r"(done) : "r"(at(&bar)), "l"(token) : "memory");
      y[threadIdx.x] = done;
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
      asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1], 1;" : "=l"(token) : "r"(at(&bar)) : "memory");
      asm volatile("{.reg .pred p; on: mbarrier.try_wait.acquire.cta.shared::cta.b64 p, [%0], %1, 1000; @!p bra on;}"
                   :: "r"(at(&bar)), "l"(token) : "memory");
      y[threadIdx.x] = 1;
    }
    """)
    assert (y[:64] == 1).all()


COUNTS = """
    if (threadIdx.x == 3)
      asm volatile("mbarrier.arrive.b64 _, [%0], 30;" :: "l"(&bar) : "memory");
    if (threadIdx.x == 5 || threadIdx.x == 35) arrive(&bar);
    wait(&bar, 0);
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(at(&bar)) : "memory");
    if (threadIdx.x == 0) init(&bar, 2);
    y[threadIdx.x] = threadIdx.x;
"""


@truth
def test_counts_and_generic_addresses():
    for races in (False, True):
        assert (phases(COUNTS, check_races=races)[:64] == np.arange(64)).all()


@pytest.mark.parametrize("what", ["inval", "init"])
def test_an_mbarrier_ends_when_nobody_waits_any_more(what):
    """A warp that still waits would wait at the new one, for ever: on a card it did."""
    body = COUNTS.replace("    __syncthreads();\n", "")
    if what == "inval":
        body = body.replace("if (threadIdx.x == 0) init(&bar, 2);", "")
    with pytest.raises(simt.RaceError, match=r"race on .*\(bar\)"):
        phases(body, check_races=True)


def test_a_pipeline_of_threads():
    """Two halves of a block hand 40 values over through two places, in turn; with races looked for."""
    body = """
    __shared__ u64 full[2], empty[2];
    __shared__ int place[2][32];
    if (threadIdx.x == 0) for (int s = 0; s < 2; s++) init(&full[s], 32), init(&empty[s], 32);
    __syncthreads();
    int lane = threadIdx.x % 32, sum = 0;
    for (int i = 0; i < 40; i++) {
      int s = i % 2, turn = i / 2 % 2;
      if (threadIdx.x < 32) {
        wait(&empty[s], turn ^ 1);
        place[s][lane] = i * lane;
        arrive(&full[s]);
      } else {
        wait(&full[s], turn);
        sum += place[s][31 - lane];
        arrive(&empty[s]);
      }
    }
    y[blockIdx.x * 64 + threadIdx.x] = sum;
    """
    y = np.zeros(256, np.int32)
    for races in (False, True):
        run(body, 4, 64, y, check_races=races)
        assert (y.reshape(4, 2, 32)[:, 1] == 780 * np.arange(32)[::-1]).all()
    with pytest.raises(simt.RaceError, match=r"race on .*place"):
        run(body.replace("wait(&full[s], turn);", ""), 4, 64, y, check_races=True)
    with pytest.raises(simt.RaceError, match=r"race on .*place"):
        run(body.replace("wait(&empty[s], turn ^ 1);", ""), 4, 64, y, check_races=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "if (threadIdx.x < 30) arrive(&bar);\n wait(&bar, 0);",
            r"byte 0 of .*\(bar\), whose phase 0 .* lacks 2 of 32 arrivals",
        ),
        (
            "if (threadIdx.x < 32) arrive(&bar);\n wait(&bar, 0);\n wait(&bar, 1);",
            "whose phase 1 .* lacks 32 of 32 arrivals",
        ),
        (
            "if (threadIdx.x < 31) arrive(&bar);\n if (threadIdx.x == 0) expect(&bar, 64);\n wait(&bar, 0);",
            "lacks 64 bytes",
        ),
        ("if (threadIdx.x == 0) wait(&bar, 0);\n __syncthreads();", "lacks 32 of 32 arrivals"),
    ],
)
def test_deadlocks_are_named(body, text):
    with pytest.raises(simt.Deadlock, match=text) as caught:
        phases(body)
    assert "waits at the mbarrier" in str(caught.value)
    # Of a statement of two lines NVRTC 13.5 names the first, NVRTC 13.0 and 13.2 the second.
    assert "asm volatile" in str(caught.value) or '"r"(parity)' in str(caught.value)


def test_deadlocks_are_named_whatever_the_lines():
    """Made ready in line 64, waited at in line 32: numbers that have no bit in common."""
    body = """__shared__ u64 bar;
#line 64
asm volatile("mbarrier.init.shared.b64 [%0], 2;" :: "r"(at(&bar)) : "memory");
unsigned over = 0;
while (!over)
#line 32
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }" : "=r"(over)
               : "r"(at(&bar)) : "memory");
y[0] = over;"""
    with pytest.raises(simt.Deadlock, match=r"waits at the mbarrier .*\(bar\), whose phase 0 .* lacks 2 of 2 arrivals"):
        run(body, 1, 1, np.zeros(1, np.int32))


def test_bytes_that_nobody_announced():
    with pytest.raises(simt.Deadlock, match="lacks the announcement of 128 bytes that have come"):
        line(("expect(&bar, 256)", "expect(&bar, 128)"))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("if (threadIdx.x == 0) expect(&bar, 16);\n arrive(&bar);", r"more arrivals at the mbarrier .*\(bar\)"),
        ("__shared__ u64 other; arrive(&other);", "has not been initialised"),
        ("if (threadIdx.x == 9) init(&bar, 1);", "is initialised anew; it has been at line"),
        ("__shared__ u64 more; if (threadIdx.x < 3) init(&more, 1);", "several threads of a block initialise"),
        ("__shared__ u64 more; if (threadIdx.x < 1) init(&more, blockIdx.x);", "1 to 1048575 arrivals; got 0"),
        ('asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(&bar) + 4));', "at a multiple of 8"),
        ('asm volatile("mbarrier.arrive.b64 _, [%0];" :: "l"(y));', "not one of shared memory"),
        ("expect(&bar, 1 << 20);", "would wait for more than"),
    ],
)
def test_faults_of_mbarriers(body, text):
    with pytest.raises(simt.AsyncFault if "not one of" not in text else simt.MemoryFault, match=text):
        phases(body)


def test_an_mbarrier_is_no_plain_memory():
    with pytest.raises(simt.MemoryFault, match="to which nothing has been written"):
        phases("y[threadIdx.x] = (int)*(volatile u64*)&bar;")


def test_initialisation_needs_a_barrier():
    body = "__shared__ u64 bar;\n if (threadIdx.x == 0) init(&bar, 64);\n BARRIER\n arrive(&bar);\n wait(&bar, 0);"
    run(body.replace("BARRIER", "__syncthreads();"), 1, 64, np.zeros(4, np.int32), check_races=True)
    with pytest.raises(simt.RaceError, match=r"race on .*\(bar\)"):
        run(body.replace("BARRIER", ""), 1, 64, np.zeros(4, np.int32), check_races=True)


# ---- the rest ----


@truth
def test_named_barriers():
    """Warps 0 and 1 hand over to warps 2 and 3 by bar.arrive; then each pair meets at a barrier of its own."""
    body = """
    __shared__ int place[64], mine[128];
    int pair = threadIdx.x / 64;
    if (pair == 0) {
      place[threadIdx.x] = 3 * threadIdx.x;
      asm volatile("bar.arrive 1, 128;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 128;" ::: "memory");
      y[threadIdx.x] = place[127 - threadIdx.x];
    }
    mine[threadIdx.x] = threadIdx.x;
    asm volatile("bar.sync %0, 64;" :: "r"(2 + pair) : "memory");
    y[128 + threadIdx.x] = mine[threadIdx.x ^ 63];
    """
    for races in (False, True):
        y = np.zeros(256, np.int32)
        run(body, 2, 128, y, check_races=races)
        assert (y[64:128] == 3 * np.arange(64)[::-1]).all() and (y[128:] == np.arange(128) ^ 63).all()
    with pytest.raises(simt.Deadlock, match="waits at a barrier of the block"):
        run(body.replace("bar.arrive 1, 128", "bar.arrive 5, 128"), 2, 128, np.zeros(256, np.int32))


@truth
def test_turns_by_named_barriers():
    """Two warpgroups take turns: each waits for the other's bar.arrive, all at the same instructions."""
    body = """
    __shared__ int turns, order[8];
    int w = threadIdx.x / 128;
    if (threadIdx.x == 0) turns = 0;
    __syncthreads();
    if (w == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
    for (int i = 0; i < 4; i++) {
      asm volatile("bar.sync %0, 256;" :: "r"(1 + w) : "memory");
      if (threadIdx.x % 128 == 0) order[turns++] = 10 * w + i;
      asm volatile("bar.arrive %0, 256;" :: "r"(2 - w) : "memory");
    }
    asm volatile("bar.sync 7, 256;" ::: "memory");
    if (threadIdx.x < 8) y[threadIdx.x] = order[threadIdx.x];
    """
    y = np.zeros(8, np.int32)
    run(body, 1, 256, y)
    assert y.tolist() == [0, 10, 1, 11, 2, 12, 3, 13]


@truth
def test_one_lane_is_elected():
    """The lowest that is named: so a card does it, too."""
    body = """
    unsigned leader, p;
    y[threadIdx.x] = elected();
    if (threadIdx.x % 32 > 4) {
      asm volatile("{ .reg .pred q; elect.sync %0|q, 0xffffffe0; selp.b32 %1, 1, 0, q; }" : "=r"(leader), "=r"(p));
      y[64 + threadIdx.x] = 100 * p + leader;
    }
    """
    y = np.full(128, -1, np.int32)
    run(body, 1, 64, y)
    lanes = np.arange(64) % 32
    assert (y[:64] == (lanes == 0)).all()
    assert (y[64:][lanes > 4] == np.where(lanes == 5, 105, 5)[lanes > 4]).all()


def test_small_instructions():
    body = """
    unsigned rank, size;
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(size) : "r"(16));
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(y) : "memory");
    asm volatile("prefetch.tensormap [%0];" :: "l"(y) : "memory");
    asm volatile("nanosleep.u32 20;");
    y[threadIdx.x] = rank + size;
    """
    y = np.full(64, -1, np.int32)
    run(body, 1, 64, y)
    assert (y == 16).all()


@truth
def test_stmatrix_undoes_ldmatrix():
    body = """
    __shared__ __align__(16) unsigned short s[256], t[256];
    for (int i = threadIdx.x; i < 256; i += 32) s[i] = i;
    __syncwarp();
    unsigned r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at(s + 8 * threadIdx.x)));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.HOW.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at(t + 8 * threadIdx.x)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) y[i] = t[i];
    """
    y = np.zeros(256, np.int32)
    report = run(body.replace("HOW", "shared"), 1, 32, y)
    assert (y == np.arange(256)).all()
    assert report.counters["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"] == 0
    run(body.replace("HOW", "trans.shared"), 1, 32, y)
    assert (y.reshape(4, 8, 8) == np.arange(256).reshape(4, 8, 8).swapaxes(1, 2)).all()


def test_the_architecture_is_asked_for():
    with pytest.raises(simt.CompileError, match='hint: .* need arch="sm_90a"'):
        simt.compile(GEMM)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];" :: "r"(0), '
         '"r"(16), "r"(32)', "clusters of blocks"),
        ('"cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2}],'
         ' [%2], {%3};" :: "r"(0), "l"(y), "r"(8), "h"((short)0)', "not supported"),
    ],
)  # fmt: skip
def test_what_stays_unsupported(text, why):
    with pytest.raises(simt.Unsupported, match=why) as caught:
        run(f"asm volatile({text});", 1, 32, np.zeros(4, np.int32))
    assert "line" in str(caught.value) and re.search("asm volatile", str(caught.value))


def test_reports_show_what_runs_beside_the_threads():
    report = line()[1]
    assert "bulk copies and wgmma: 1,280 bytes to shared memory, 1,280 bytes from shared memory" in str(report)
    assert "1,280 bytes to shared memory" in report._repr_html_()
    plain = run("y[threadIdx.x] = 1;", 1, 32, np.zeros(32, np.int32))
    assert "bulk" not in str(plain) and not any(name.startswith("simt__") for name in plain.counters)


# ---- what a card gave ----


def test_what_is_stored_belongs_to_a_test():
    names = {name.partition("[")[0] for name in STORED}
    assert names == TRUTH and sum(map(len, STORED.values())) >= 100


def test_what_a_card_would_be_given(monkeypatch):
    """Two maps and a pointer over one array, with CPU tensors in the place of a card's."""
    import torch
    from simt_truth.hopper import Card

    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    array = np.arange(24 * 96, dtype=np.uint16).reshape(24, 96)
    maps = [simt.TensorMap(array[8:, 16:80], (8, 64), swizzle=128), simt.TensorMap(array[:8, 32:], (8, 64))]
    body = """
    extern __shared__ __align__(1024) unsigned char s[];
    __shared__ u64 bar;
    if (threadIdx.x == 0) {
      init(&bar, 1);
      expect(&bar, 1024);
      load2(s, &from, 0, 8, &bar);
      wait(&bar, 0);
      store2(&to, 0, 0, s);
      commit_stores();
      wait_stores();
      *y = more;
    }
    """
    head, parameters = (
        "const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to",
        "int* y, int more",
    )
    source = PRELUDE + f'extern "C" __global__ void k({head}, {parameters}) {{\n{body}\n}}'
    box = array[16:, 16:80].reshape(8, 8, 8)  # rows of eight pieces, exchanged in shared memory and stored as they lie
    right = np.stack([row[np.arange(8) ^ n] for n, row in enumerate(box)]).reshape(8, 64)
    found, card = np.zeros(4, np.int32), Card()
    report = card("name", source, "k", 1, 32, [*maps, found, np.int32(7)], {"shared": 1024}, True)
    assert (array[:8, 32:] == right).all() and found.tolist() == [7, 0, 0, 0]
    assert report.counters["simt__bulk_load_bytes.sum"] == 1024
    assert not card.unequal and card.found == {"name": [checksum([*maps, found])]}
