"""Memory: each fault with its line, element, block and thread; views, tails, generic addresses, atomics, sectors."""

import sys

import numpy as np
import pytest

import simt

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
I32, U32, F32 = np.int32, np.uint32, np.float32
LOADS = "l1tex__t_{}_pipe_lsu_mem_global_op_ld.sum"
STORES = "l1tex__t_{}_pipe_lsu_mem_global_op_st.sum"


def run(body, grid, block, *args, before="", **how):
    """Launch a kernel k whose parameters and body are given, as '(int* y) { ... }'. The body begins in line 2."""
    return simt.compile(f'{before}\nextern "C" __global__ void k{body}')["k"](grid, block, *args, **how)


def fault(body, grid, block, *args, before="", **how):
    with pytest.raises(simt.MemoryFault) as caught:
        run(body, grid, block, *args, before=before, **how)
    return str(caught.value)


def floats(n):
    return np.zeros(n, F32)


# Out of bounds.


def test_a_load_behind_the_end():
    body = """(const float* x, float* y) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      y[i] = x[i] * 2;
    }"""
    assert fault(body, 2, 128, floats(250), floats(256)) == (
        "kernel k, line 4 `y[i] = x[i] * 2;`: reads x[250], but x has 250 elements of float32; "
        "block (1, 0, 0), thread (122, 0, 0)"
    )


def test_a_store_behind_the_end_and_one_before_the_beginning():
    body = """(float* y, int by) {
      int i = threadIdx.x + blockIdx.y * 16;
      y[i + by] = 1;
    }"""
    said = fault(body, (1, 2), (16, 2), floats(32), I32(1))
    assert "line 4 `y[i + by] = 1;`: writes y[32], but y has 32 elements of float32" in said
    assert said.endswith("block (0, 1, 0), thread (15, 0, 0)")
    said = fault(body, 1, 16, floats(32), I32(-1))
    assert "writes y[-1], but y has 32 elements" in said and said.endswith("thread (0, 0, 0)")


def test_far_outside_and_null():
    body = "(float* y, long long far) { y[far + threadIdx.x] = 1; }"
    assert "which no argument owns" in fault(body, 1, 32, floats(32), np.int64(1 << 40))
    assert "null pointer?" in fault("(float** y) { *y[threadIdx.x] = 1; }", 1, 32, np.zeros(32, np.uint64))
    assert "address 0x0, which no argument owns (a null pointer?)" in fault(
        "(float* y) { y[0] = 1; }", 1, 1, np.uint64(0)
    )


def test_only_some_lanes_are_outside():
    """The tail of a vector load, the wrong guard of a loop: found at the first thread that strays."""
    body = """(const float4* x, float* y, int n) {
      int i = threadIdx.x;
      if (i < n) { float4 v = x[i]; y[i] = v.x + v.w; }
    }"""
    said = fault(body, 1, 32, floats(50), floats(32), I32(13))
    assert "reads 16 bytes from x[48] on, but x has 50 elements of float32; block (0, 0, 0), thread (12, 0, 0)" in said
    run(body, 1, 32, floats(50), floats(32), I32(12))


def test_masked_tails():
    """Lanes without a part in it may point anywhere; what they would have touched stays."""
    x, y = np.arange(1000, dtype=F32), np.full(1000, -1, F32)
    body = """(const float* x, float* y, int n) {
      for (int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4; i < n; i += gridDim.x * blockDim.x * 4)
        for (int k = 0; k < 4; k++) if (i + k < n) y[i + k] = x[i + k] * 2; }"""
    report = run(body, 2, 96, x[:997].copy(), y[:997], I32(997))
    assert (y[:997] == 2 * x[:997]).all() and (y[997:] == -1).all()
    assert report.counters[LOADS.format("requests")] > 0


def test_a_guarded_access_counts_the_lanes_that_take_part():
    for n, sectors in ((32, 4), (8, 1), (9, 2), (1, 1), (0, 0)):
        body = "(const float* x, float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x]; }"
        counters = run(body, 1, 32, floats(32), floats(32), I32(n)).counters
        assert counters.get(LOADS.format("sectors"), 0) == sectors
        assert counters.get(STORES.format("requests"), 0) == (n > 0)


def test_misaligned_vectors():
    body = "(float* y, int by) {\n *(float4*)(y + 4 * threadIdx.x + by) = make_float4(1, 2, 3, 4); }"
    run(body, 1, 8, floats(64), I32(4))
    said = fault(body, 1, 8, floats(64), I32(2))
    assert "line 3" in said and "writes 16 bytes from y[2] on: 16 bytes at once must start at a multiple of 16" in said
    said = fault("(double* y) { *(double*)((char*)y + 4 * threadIdx.x) = 1; }", 1, 8, np.zeros(64))
    assert "writes byte 4 of y" in said or "8 bytes from byte 4 of y on" in said
    assert said.endswith("thread (1, 0, 0)")


def test_a_view_of_a_tensor_may_be_misaligned():
    body = "(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }"
    for misalignment, sectors in ((0, 4), (4, 5), (32, 4), (60, 5)):
        x = np.arange(32, dtype=F32)
        y = floats(32)
        report = run(body, 1, 32, simt.Buffer(x, misalignment), y)
        assert report.counters[LOADS.format("sectors")] == sectors and (y == x).all()
    vector = "(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }"
    run(vector, 1, 8, simt.Buffer(floats(32), 16), floats(32))
    assert "multiple of 16 bytes" in fault(vector, 1, 8, simt.Buffer(floats(32), 8), floats(32))


@pytest.mark.parametrize("misalignment", [0, 3, 12])
def test_words_in_an_array_of_bytes_that_starts_anywhere(misalignment):
    body = """(unsigned char* x, const int* at, unsigned* y) {
        while ((size_t)x % 8) x++;
        unsigned* words = (unsigned*)x;
        y[threadIdx.x] = words[64 + threadIdx.x] + words[64 + at[threadIdx.x]];
        words[at[threadIdx.x]] = threadIdx.x;
        if (threadIdx.x % 2) words[32 + at[threadIdx.x]] = ((const uint2*)x)[32 + at[threadIdx.x] / 2].y;
        atomicAdd(words + 96 + at[threadIdx.x] / 2, 3);
    }"""
    x = np.random.default_rng(misalignment).integers(0, 256, 520, np.uint8)
    at, y = np.random.default_rng(0).permutation(32).astype(np.int32), np.zeros(32, np.uint32)
    words = x[-misalignment % 8 :][:512].copy().view(np.uint32)
    wanted, odd = words.copy(), at[1::2]
    wanted[at] = np.arange(32)
    wanted[32 + odd] = words[64 + odd // 2 * 2 + 1]
    np.add.at(wanted, 96 + at // 2, 3)
    run(body, 1, 32, simt.Buffer(x, misalignment), at, y)
    assert (y == words[64:96] + words[64 + at]).all()
    assert (x[-misalignment % 8 :][:512].view(np.uint32) == wanted).all()


def test_arrays_that_nothing_may_be_written_to():
    y = floats(64)
    y.flags.writeable = False
    for body, element, thread in (
        ("(float* y) { y[63 - threadIdx.x] = 1; }", 63, 0),
        ("(float* y) { if (threadIdx.x >= 7) y[threadIdx.x * threadIdx.x % 64] = 1; }", 49, 7),
        ("(float* y) { atomicAdd(&y[threadIdx.x / 2 + 3], 1.f); }", 3, 0),
    ):
        said = fault(body, 1, 64, y)
        assert "line 2" in said and f"y[{element}], which is read-only; " in said and f"thread ({thread}, 0, 0)" in said
        assert not y.any()
    run("(const float* y, float* z) { z[threadIdx.x] = y[threadIdx.x]; }", 1, 64, y, floats(64))
    before = "__constant__ int table[4] = {1, 2, 3, 4};"
    said = fault(
        "(int* y) { *(int*)((unsigned long long)table + 4 * y[0]) = 5; }", 1, 32, np.zeros(1, I32), before=before
    )
    assert "byte 0 of table" in said or "table[0]" in said


def test_arrays_without_elements():
    body = "(const float* x, float* y, int n) { for (int i = threadIdx.x; i < n; i += 32) y[i] = x[i]; }"
    run(body, 1, 32, floats(0), floats(0), I32(0))
    run(body, 1, 32, floats((0, 5)), floats(0), I32(0))
    assert "reads x[0], but x has 0 elements of float32" in fault(body, 1, 32, floats(0), floats(8), I32(1))


def test_views_share_their_memory():
    whole = np.arange(64, dtype=F32)
    run("(float* a, float* b) { b[threadIdx.x] = a[threadIdx.x + 32] + 1; }", 1, 32, whole, whole[:32])
    assert whole.tolist() == [*range(33, 65), *range(32, 64)]
    same = np.arange(32, dtype=F32)
    run("(float* a, float* b) { a[threadIdx.x] = 5; b[threadIdx.x] += 1; }", 1, 32, same, same)
    assert (same == 6).all()
    with pytest.raises(simt.LaunchError, match="overlaps"):
        run("(float* a, float* b) { }", 1, 1, whole[:40], whole[20:])
    bits = np.arange(32, dtype=F32)
    run("(float* a, unsigned* b) { b[threadIdx.x] ^= 0x80000000u; }", 1, 32, bits, bits.view(U32))
    assert bits.tolist() == [-n for n in range(32)]


# Shared and local memory.


def test_shared_overruns():
    body = """(float* y) {
      __shared__ float tile[32];
      tile[threadIdx.x] = 1;
      __syncthreads();
      y[threadIdx.x] = tile[threadIdx.x + 1];
    }"""
    said = fault(body, 1, 32, floats(32))
    assert "line 6 `y[threadIdx.x] = tile[threadIdx.x + 1];`: reads 4 bytes at byte 128 of shared memory" in said
    assert "a block has 128 bytes of it; block (0, 0, 0), thread (31, 0, 0)" in said
    said = fault(
        "(float* y) { extern __shared__ float s[]; s[threadIdx.x] = 1; y[0] = s[0]; }", 1, 32, floats(1), shared=64
    )
    assert "writes 4 bytes at byte 64 of shared memory (s), but a block has 64 bytes" in said


def test_shared_memory_larger_than_48_kilobytes():
    y = floats(25_000)
    body = """(float* y) {
      extern __shared__ float s[];
      for (int i = threadIdx.x; i < 25000; i += blockDim.x) s[i] = i;
      __syncthreads();
      for (int i = threadIdx.x; i < 25000; i += blockDim.x) y[i] = s[24999 - i]; }"""
    run(body, 1, 256, y, shared=100_000)
    assert (y == np.arange(24999, -1, -1)).all()


@pytest.mark.parametrize("index", ["threadIdx.x", "0", "(threadIdx.x * 7) & 63", "threadIdx.x & ~3"])
def test_shared_memory_holds_nothing_at_first(index):
    body = f"""(float* y, int from) {{
      __shared__ float s[64];
      if (threadIdx.x >= from) s[threadIdx.x] = 1;
      __syncthreads();
      y[threadIdx.x] = s[{index}];
    }}"""
    run(body, 1, 64, floats(64), I32(0))  # first without the fault: what was seen there must not be remembered
    said = fault(body, 1, 64, floats(64), I32(1))
    assert (
        "line 6" in said and "reads 4 bytes at byte 0 of shared memory (s), to which nothing has been written" in said
    )


def test_local_arrays():
    y = floats(64)
    body = """(float* y, int n) {
      float a[8];
      for (int i = 0; i < n; i++) a[(i * 5) & 7] = i;
      y[threadIdx.x] = a[threadIdx.x & 7];
    }"""
    run(body, 1, 64, y, I32(8))
    assert y.reshape(8, 8).tolist() == [[(i * 5) % 8 for i in range(8)]] * 8
    said = fault(body, 1, 64, y, I32(4))
    assert "line 5" in said and "of local memory, to which nothing has been written" in said
    assert said.endswith("thread (1, 0, 0)")
    assert "of local memory, but a thread has" in fault(body.replace("& 7] = i", "& 63] = i"), 1, 64, y, I32(12))


COPY = """(const float4* x, float4* y, int wait) {
      __shared__ float4 s[64];
      __pipeline_memcpy_async(&s[threadIdx.x], &x[threadIdx.x], 16);
      __pipeline_commit();
      __pipeline_memcpy_async(&s[threadIdx.x + 32], &x[threadIdx.x + 32], 16);
      __pipeline_commit();
      if (wait == 1) __pipeline_wait_prior(1);
      if (wait == 0) __pipeline_wait_prior(0);
      y[threadIdx.x] = s[threadIdx.x];
      if (wait < 2) y[threadIdx.x + 32] = s[threadIdx.x + 32];
    }"""


def test_an_asynchronous_copy_must_be_waited_for():
    x, y = np.arange(256, dtype=F32), floats(256)
    before = "#include <cuda_pipeline.h>"
    run(COPY, 1, 32, x, y, I32(0), before=before)
    assert (y == x).all()
    said = fault(COPY, 1, 32, x, y, I32(2), before=before)
    assert "line 10" in said and "an asynchronous copy may not have arrived" in said
    said = fault(COPY, 1, 32, x, y, I32(1), before=before)
    assert "line 11" in said and "byte 512 of shared memory (s), where an asynchronous copy may not" in said


def test_a_copy_over_what_was_there_hides_it():
    """The second use of a buffer, without a wait: the old values must not pass for the new ones."""
    body = """(const float* x, float* y, int wait) {
      __shared__ float s[32];
      s[threadIdx.x] = -1;
      __pipeline_memcpy_async(&s[threadIdx.x], &x[threadIdx.x], 4);
      __pipeline_commit();
      if (wait) __pipeline_wait_prior(0);
      y[threadIdx.x] = s[threadIdx.x];
    }"""
    x, y, before = np.arange(32, dtype=F32), floats(32), "#include <cuda_pipeline.h>"
    run(body, 1, 32, x, y, I32(1), before=before)
    assert (y == x).all()
    assert "asynchronous copy may not have arrived" in fault(body, 1, 32, x, y, I32(0), before=before)


def test_an_asynchronous_copy_may_fill_up_with_zeros():
    x, y = np.arange(1, 129, dtype=F32), floats(128)
    body = """(const float4* x, float4* y, int n) {
      __shared__ float4 s[32];
      int left = n - 4 * (int)threadIdx.x, zeros = left >= 4 ? 0 : left <= 0 ? 16 : 16 - 4 * left;
      __pipeline_memcpy_async(&s[threadIdx.x], &x[threadIdx.x], 16, zeros);
      __pipeline_commit();
      __pipeline_wait_prior(0);
      y[threadIdx.x] = s[threadIdx.x]; }"""
    run(body, 1, 32, x, y, I32(102), before="#include <cuda_pipeline.h>")
    assert y.tolist() == [n + 1 if n < 102 else 0 for n in range(128)]


def test_an_asynchronous_copy_may_have_a_policy_and_fewer_bytes():
    x, y = np.arange(1, 129, dtype=F32), floats(128)
    body = """(const float4* x, float4* y, int n) {
      __shared__ float4 s[32];
      int left = n - 4 * (int)threadIdx.x, bytes = left >= 4 ? 16 : left <= 0 ? 0 : 4 * left;
      unsigned long long policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3; cp.async.wait_all;"
                   ::"r"((unsigned)__cvta_generic_to_shared(&s[threadIdx.x])), "l"(&x[threadIdx.x]), "r"(bytes),
                     "l"(policy) : "memory");
      y[threadIdx.x] = s[threadIdx.x]; }"""
    run(body, 1, 32, x, y, I32(102))
    assert y.tolist() == [n + 1 if n < 102 else 0 for n in range(128)]


# Addresses of any memory.

SUM = """__device__ __noinline__ float sum(float* p, int n) {
  float s = 0;
  for (int i = 0; i < n; i++) s += p[i];
  return s; }"""


def test_generic_addresses_of_shared_and_global_memory_at_once():
    y, x = floats(64), np.arange(10, 20, dtype=F32)
    body = """(float* y, float* x, int n) {
      __shared__ float s[64];
      int t = threadIdx.x;
      float own[4] = {100, 200, 300, 400};
      s[t] = t;
      __syncthreads();
      float r = -1;
      if (t >= n) r = sum(t % 3 == 0 ? own : t % 3 == 1 ? s + t % 8 : x, t % 4);
      y[t] = r; }"""
    run(body, 1, 64, y, x, I32(20), before=SUM)

    def thread(t):
        p = ([100, 200, 300, 400], range(t % 8, 64), x)[t % 3]
        return sum(p[: t % 4]) if t >= 20 else -1

    assert y.tolist() == [thread(t) for t in range(64)]


def test_stores_and_atomics_by_generic_addresses():
    before = "__device__ __noinline__ int bump(int* p, int by) { p[1] = by; return atomicAdd(p, by); }"
    y, z = np.zeros(64, I32), np.zeros(2, I32)
    body = """(int* y, int* z) {
      __shared__ int s[2];
      int t = threadIdx.x;
      if (t < 2) s[t] = 0;
      __syncthreads();
      y[t] = bump(t & 1 ? s : z, t);
      __syncthreads();
      if (t == 0) { atomicAdd(z, 1000 * s[0]); z[1] += s[1] % 2; } }"""
    run(body, 1, 64, y, z, before=before)
    assert z[0] == sum(range(0, 64, 2)) + 1000 * sum(range(1, 64, 2)) and z[1] % 2 == 1
    assert y.tolist() == [sum(range(t % 2, t, 2)) for t in range(64)]


def test_a_warp_may_touch_two_arrays_by_one_instruction():
    body = """(float* a, float* b, int* n) {
      int t = threadIdx.x;
      float* p = t < 16 ? a : b;
      p[t] = p[t + 1] + 1;
      if (t > 3) atomicAdd(t & 1 ? n : n + 40, 1); }"""
    a, b, n = floats(33), np.arange(33, dtype=F32), np.zeros(64, I32)
    counters = run(body, 1, 32, a, b, n).counters
    assert a[:16].tolist() == [1] * 16 and b[16:32].tolist() == [t + 2 for t in range(16, 32)]
    assert n[0] == n[40] == 14
    assert counters[STORES.format("requests")] == 1 and counters[STORES.format("sectors")] == 4
    assert counters[LOADS.format("requests")] == 1 and counters[LOADS.format("sectors")] == 6


def test_what_one_launch_found_is_not_kept_for_the_next():
    """The same kernel, a fault in between: the counters start at zero, and nothing is left behind."""
    kernel = simt.compile(
        'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    )["k"]
    first = kernel(1, 32, floats(32), floats(32))
    with pytest.raises(simt.MemoryFault):
        kernel(1, 32, floats(31), floats(32))
    assert kernel(1, 32, floats(32), floats(32)).counters == first.counters


# Atomics: lane after lane, each on what the one before it left.


def one_after_the_other(update, start, index, *given):
    """(memory, old values) after the lanes have come in order."""
    memory, old = list(start), []
    for n, at in enumerate(index):
        old.append(memory[at])
        memory[at] = update(memory[at], *(g[n] for g in given))
    return memory, old


ATOMICS = {
    "atomicAdd": lambda old, v: old + v,
    "atomicMin": min,
    "atomicMax": max,
    "atomicAnd": lambda old, v: old & v,
    "atomicOr": lambda old, v: old | v,
    "atomicXor": lambda old, v: old ^ v,
    "atomicExch": lambda old, v: v,
    "atomicInc": lambda old, v: 0 if old >= v else old + 1,
    "atomicDec": lambda old, v: v if old == 0 or old > v else old - 1,
}
WIDTHS = {"int": I32, "unsigned": U32, "unsigned long long": np.uint64, "long long": np.int64}


@pytest.mark.parametrize("place", ["global", "shared"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ATOMICS
        for kind in WIDTHS
        if (name not in ("atomicInc", "atomicDec") or kind == "unsigned")  # CUDA has these for unsigned only
        and (kind != "long long" or name in ("atomicMin", "atomicMax"))  # and the others for unsigned long long
    ],
)
def test_atomics_give_the_old_value_lane_by_lane(kind, name, place):
    dtype = WIDTHS[kind]
    rng = np.random.default_rng(5)
    low = -50 if np.dtype(dtype).kind == "i" else 0
    start, given = rng.integers(low, 90, 8).astype(dtype), rng.integers(low, 90, 64).astype(dtype)
    memory, old = start.copy(), np.zeros(64, dtype)
    target = "s" if place == "shared" else "m"
    body = f"""({kind}* m, const {kind}* v, {kind}* old) {{
      __shared__ {kind} s[8];
      int t = threadIdx.x;
      if (t < 8) s[t] = m[t];
      __syncthreads();
      old[t] = {name}(&{target}[t * t % 7], v[t]);
      __syncthreads();
      if (t < 8 && {int(place == "shared")}) m[t] = s[t]; }}"""
    run(body, 1, 64, memory, given, old)
    index = [t * t % 7 for t in range(64)]
    wanted = one_after_the_other(ATOMICS[name], map(int, start), index, list(map(int, given)))
    assert (memory.tolist(), old.tolist()) == wanted


@pytest.mark.parametrize(
    ("kind", "dtype"), [("int", I32), ("unsigned long long", np.uint64), ("unsigned short", np.uint16)]
)
def test_compare_and_swap(kind, dtype):
    memory, old = np.zeros(2, dtype), np.zeros(64, dtype)
    body = f"""({kind}* m, {kind}* old) {{
      int t = threadIdx.x;
      old[t] = atomicCAS(&m[t & 1], ({kind})(t / 4), ({kind})(t / 4 + 1)); }}"""
    run(body, 1, 64, memory, old)
    wanted = one_after_the_other(
        lambda old, a, b: b if old == a else old, [0, 0], [t & 1 for t in range(64)],
        [t // 4 for t in range(64)], [t // 4 + 1 for t in range(64)],
    )  # fmt: skip
    assert (memory.tolist(), old.tolist()) == wanted


def test_atomic_additions_of_floats():
    for kind, dtype in (("float", F32), ("double", np.float64)):
        memory, old = np.zeros(3, dtype), np.zeros(96, dtype)
        run(
            f"({kind}* m, {kind}* old) {{ int t = threadIdx.x; old[t] = atomicAdd(&m[t % 3], ({kind})t); }}",
            1,
            96,
            memory,
            old,
        )
        wanted = one_after_the_other(lambda a, b: a + b, [0, 0, 0], [t % 3 for t in range(96)], list(range(96)))
        assert (memory.tolist(), old.tolist()) == wanted
    memory = np.zeros(1, F32)
    run("(float* m) { atomicAdd(m, 0.1f); }", 3, 96, memory)
    assert memory[0] == pytest.approx(28.8, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "header", "dtype"), [("__half", "cuda_fp16.h", np.float16), ("__nv_bfloat16", "cuda_bf16.h", None)]
)
def test_atomic_additions_of_halves(kind, header, dtype):
    values = (
        np.arange(6, dtype=np.float16).view(np.uint16)
        if dtype
        else (np.arange(6, dtype=F32).view(U32) >> 16).astype(np.uint16)
    )
    memory = values.copy()
    pair = kind + "2" if kind == "__half" else "__nv_bfloat162"
    body = f"""({kind}* m) {{
      int t = threadIdx.x;
      {pair} v; v.x = {kind}(1.f); v.y = {kind}(t % 2 ? 2.f : 0.f);
      atomicAdd(({pair}*)m + t % 2, v);
      if (t < 4) atomicAdd(m + 4 + t % 2, {kind}(0.5f)); }}"""
    run(body, 1, 32, memory, before=f"#include <{header}>")
    got = memory.view(np.float16).astype(float) if dtype else (memory.astype(U32) << 16).view(F32)
    assert got.tolist() == [16, 1, 18, 35, 5, 6]


def test_atomics_touch_only_what_is_written():
    body = "(int* y) { __shared__ int s[4]; if (threadIdx.x) atomicAdd(&s[threadIdx.x & 3], 1); y[0] = 1; }"
    said = fault(body, 1, 32, np.zeros(1, I32))
    assert "accesses 4 bytes at byte 4 of shared memory (s), to which nothing has been written" in said
    said = fault("(int* y) {\n atomicAdd(&y[threadIdx.x], 1); }", 1, 64, np.zeros(40, I32))
    assert (
        "line 3" in said
        and "accesses y[40], but y has 40 elements of int32; block (0, 0, 0), thread (40, 0, 0)" in said
    )


@pytest.mark.parametrize("value", [1e-40, 1e-37, 1.0])
def test_float_atomics_take_subnormal_numbers_for_zero_on_global_memory_only(value):
    """As an H200 does: 32 times 1e-40 is 0 there, and 3.2e-39 on shared memory."""
    y = np.zeros(3, np.float32)
    run(
        """(float* y, float v) {
      __shared__ float sum;
      if (threadIdx.x == 0) sum = 0;
      __syncthreads();
      atomicAdd(&y[0], v);
      if (atomicAdd(&y[1], v) < 0) y[2] = 1;
      atomicAdd(&sum, v);
      __syncthreads();
      if (threadIdx.x == 0) y[2] += sum; }""",
        1,
        32,
        y,
        np.float32(value),
    )
    whole = np.cumsum(np.full(32, value, np.float32))[-1]
    assert y.tolist() == [whole * (value > 1e-38)] * 2 + [whole]


def test_a_float_atomic_whose_sum_is_subnormal_gives_zero():
    y = np.float32([1.5e-38])
    run("(float* y) { atomicAdd(y, -1.2e-38f); }", 1, 1, y)
    assert y[0] == 0


@pytest.mark.parametrize("who", [0, 1])
def test_a_part_of_a_block_waits_for_its_own_copies(who):
    """One warp's wait brings what it copied, and not what the other warp did."""
    body = """(const int* x, int* y, int who) {
      __shared__ int tile[64];
      int t = threadIdx.x, at = (int)__cvta_generic_to_shared(tile + t);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(x + t));
      asm volatile("cp.async.commit_group;");
      if (t / 32 == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
      if (t / 32 == who) y[t] = tile[t]; }"""
    x, y = np.arange(64, dtype=I32), np.full(64, -1, I32)
    if who:
        assert "nothing has waited for it; block (0, 0, 0), thread (32, 0, 0)" in fault(body, 1, 64, x, y, I32(who))
    else:
        run(body, 1, 64, x, y, I32(who))
        assert y.tolist() == [*range(32), *[-1] * 32]
