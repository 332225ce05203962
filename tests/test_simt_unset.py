"""Values that nothing has set: reported where they matter, with line and variable, and nowhere else."""

import sys

import numpy as np
import pytest

import simt
from simt.arithmetic import marks
from simt.execute import declarations
from simt.ptx import unset

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

# name: (the variable, the body of k(const float* x, float* y, int n)); t is the thread, of 48; n is 20
WRONG = {
    "sum_in_a_loop": ("sum", """
        float sum;
        for (int i = t; i < n; i += 8)
            sum += x[i];  // here
        y[t] = sum;"""),
    "set_in_one_branch": ("v", """
        float v;
        if (t < n) v = x[t];
        y[t] = v * 2;  // here"""),
    "an_int_counts": ("count", """
        int count, other = 0;
        for (int i = t; i < n; i += 2)
            if (x[i] > 3) count++;  // here
        y[t] = count + other;"""),
    "an_array_in_registers": ("acc", """
        float acc[4];
        for (int i = 0; i < n; i++)
            for (int j = 0; j < 4; j++) acc[j] += x[i + j];  // here
        for (int j = 0; j < 4; j++) y[t * 4 + j] = acc[j];"""),
    "a_member": ("state", """
        float2 state;
        state.x = 3;
        for (int i = t; i < n; i += 8)
            state.y += x[i];  // here
        y[t] = state.x * state.y;"""),
    "unrolled": ("s", """
        float s;
        for (int i = 0; i < 4; i++) s += x[i * 4 + t];  // here
        y[t] = s;"""),
    "a_half": ("s", """
        __half s;
        for (int i = 0; i < n; i++)
            s = __hadd(s, __float2half(x[i]));  // here
        y[t] = __half2float(s);"""),
    "the_other_half_of_two": ("h", """
        __half2 h;
        h.x = __float2half(x[t % n]);
        for (int i = t; i < n; i += 4) h.y = __hadd(h.y, h.x);  // here
        __half2 twice = __hadd2(h, h);
        y[t] = __half2float(__high2half(twice));"""),
    "it_decides": ("s", """
        int s;
        for (int i = t; i < n; i++)
            if (x[i] > 3) s++;  // here
        if (s > 3) y[t] = 1;"""),
    "it_is_an_address": ("at", """
        int at;
        for (int i = t; i < n; i += 3)
            at += i;  // here
        y[0] = x[at & 15];"""),
    "shuffled_to_who_stores_it": ("v", """
        float v;
        if (t < 8) v = x[t];
        for (int o = 16; o; o /= 2) v += __shfl_down_sync(~0u, v, o, 16);  // here
        if (t == 0) y[0] = v;"""),
    "added_by_all_lanes": ("v", """
        int v;
        for (int i = t; i < n; i += 8) v ^= i;  // here
        y[t] = __reduce_add_sync(__activemask(), v);"""),
}  # fmt: skip
RIGHT = {  # name: (the body, y's elements that it sets)
    "read_where_it_was_set": ("float v; if (t < n) v = x[t]; __syncthreads(); if (t < n) y[t] = v * 2;",
                              lambda t, n: 2 * t),
    "computed_ahead": ("float v; if (t < n) v = x[t]; float w = t < n ? v * v : 5; y[t] = w;",
                       lambda t, n: t * t if t < n else 5),
    "not_asked": ("bool p; if (t < n) p = x[t] > 3; if (t < n && p) y[t] = 1;", lambda t, n: float(t > 3)),
    "one_is_enough": ("bool p; if (t < n) p = x[t] > 3; if (t >= n || p) y[t] = 1;", lambda t, n: float(t > 3)),
    "lanes_that_nobody_reads": (
        "float v; if (t % 32 < 8) v = x[t % 32]; for (int o = 4; o; o /= 2) v += __shfl_down_sync(~0u, v, o, 8);"
        "if (t == 0) y[0] = v;", lambda t, n: 28 if t == 0 else 0),
    "first_round": ("float best; for (int i = 0; i < n; i++) if (i == 0 || x[i] > best) best = x[i]; y[t] = best;",
                    lambda t, n: 19),
    "prefetched": ("float next; if (t < n) next = x[t]; for (int i = t; i < n; i += 8) { float now = next;"
                   "if (i + 8 < n) next = x[i + 8]; y[i] = now; }", lambda t, n: t),
    "one_half_of_two": ("__half2 h; h.x = __float2half(x[t % n]); y[t] = __half2float(__low2half(h));",
                        lambda t, n: t % n),
    "computed_with_one_half_of_two": (
        "__half2 h; h.x = __float2half(x[t % n]); for (int i = t; i < n; i += 4) h.y = __hadd(h.y, h.x);"
        "__half2 twice = __hadd2(h, __shfl_xor_sync(__activemask(), h, 0)); y[t] = __half2float(__low2half(twice));",
        lambda t, n: 2 * (t % n)),
    "early_return": ("float v; if (t < n) v = x[t]; else return; __syncthreads(); y[t] = v;", lambda t, n: t),
    "a_pointer": ("const float* p; if (t < n) p = x + t; __syncthreads(); if (t < n) y[t] = *p;", lambda t, n: t),
    "inline_assembly": ('float d; asm volatile("" : "+f"(d)); if (t < n) d = x[t]; __syncwarp(); if (t < n) y[t] = d;',
                        lambda t, n: t),
}  # fmt: skip


def source(name, body):
    head = f'extern "C" __global__ void {name}(const float* x, float* y, int n) {{ int t = threadIdx.x;'
    return f"{head}\n{body}\n}}\n"


SOURCE = "#include <cuda_fp16.h>\n" + "".join(
    [source(name, body) for name, (_, body) in WRONG.items()]
    + [source(name, body) for name, (body, _) in RIGHT.items()]
)


def launch(name, text=SOURCE, threads=48, **options):
    x, y = np.arange(64, dtype=np.float32), np.zeros(256, np.float32)
    simt.compile(text, **options)[name](3, threads, x, y, np.int32(20))
    return y


@pytest.mark.parametrize("name", WRONG)
def test_where_and_what(name):
    with pytest.raises(simt.UnsetRegister) as caught:
        launch(name)
    said, (variable, body) = str(caught.value), WRONG[name]
    here = SOURCE[: SOURCE.index(body) + body.index("// here")].count("\n") + 1
    assert said.startswith(f"kernel {name}, line {here} `")
    assert f"`: `{variable}` is read before it is set" in said and "; block (0, 0, 0), thread (" in said


@pytest.mark.parametrize("name", RIGHT)
def test_what_does_not_matter(name):
    y = launch(name)
    wanted = [RIGHT[name][1](t, 20) for t in range(48)]
    few = {"read_where_it_was_set", "not_asked", "prefetched", "early_return", "a_pointer", "inline_assembly"}
    if name in few:
        wanted[20:] = [0] * 28
    assert y[:48].tolist() == wanted and not y[48:].any()


def test_marks_of_registers_with_parts():
    raw, some = unset.COPIED, np.array([[[0, 5, -1]]], np.int32)
    assert marks.packed(0, 0) == 0 and marks.packed(0, raw) == (0, raw) and marks.packed((0, 7), 0) == (0, 7, 0, 0)
    assert [marks.part((0, raw), n, 4) for n in range(4)] == [0, 0, raw, raw]
    assert [marks.part((0, raw, 4, 4), n, 2) for n in range(2)] == [(0, raw), 4] and marks.part(raw, 1, 2) == raw
    assert marks.computed(8, (0, raw)) == 0 and marks.computed(8, (raw, raw), 0) == 9
    assert marks.computed_in_parts(8, (0, raw), 0) == (0, 9) and marks.computed_in_parts(8, (0, raw), (3, 0)) == (3, 9)
    assert marks.computed(8, some, 0).tolist() == [[[0, 5, 9]]] and marks.computed(8, 0, some * 0) == 0
    first, second = marks.merge_mark((0, raw), 0, np.array([[[True, False, False]]]))
    assert first == 0 and second.tolist() == [[[0, raw, raw]]]


def test_some_of_them_are_watched():
    """Of the kernels above that are right, some give the machine cause to look; of those with a value, none does."""
    programs = [simt.compile(SOURCE)[name].program for name in RIGHT]
    assert sum(p.flow.unset is not None for p in programs) >= 5
    assert simt.compile(source("k", "float v = 0; if (t < n) v = x[t]; y[t] = v;"))["k"].program.flow.unset is None


def test_the_message_says_what_it_matters_for():
    with pytest.raises(
        simt.UnsetRegister, match=r"set; what was computed with it goes into the store at line \d+ `y\[t\]"
    ):
        launch("sum_in_a_loop")
    with pytest.raises(
        simt.UnsetRegister, match=r"what was computed with it decides the branch at line \d+ `if \(s > 3\)"
    ):
        launch("it_decides")
    with pytest.raises(simt.UnsetRegister, match="the compiler has put a NaN in its place"):
        launch("unrolled")


def test_a_nan_that_the_source_asks_for():
    body = "float bad = __int_as_float(0x7fc00000); y[t] = t < n ? x[t] + bad : 1;"
    y = launch("k", source("k", body))
    assert np.isnan(y[:20]).all() and y[20:48].tolist() == [1] * 28


def test_what_the_optimiser_hides_is_seen_without_it():
    text = source("k", "bool found;\nfor (int i = t; i < n; i++) if (x[i] > 30) found = true;\ny[t] = found ? 1 : 0;")
    assert launch("k", text)[:48].tolist() == [1] * 48  # it takes the unset value for a true one
    with pytest.raises(simt.UnsetRegister, match="line 4 .*`found` is read before it is set"):
        launch("k", text, options=("-G",))


WGMMA = """
__device__ unsigned long long place(const void* p) {  // rows of 8 x 8 halves, one behind the other
    return (__cvta_generic_to_shared(p) & 0x3FFFF) >> 4 | 8ull << 16 | 16ull << 32;
}
extern "C" __global__ void k(float* y, int adds) {
    __shared__ alignas(128) unsigned short A[64 * 16], B[8 * 16];
    for (int i = threadIdx.x; i < 64 * 16; i += 128) A[i] = B[i % 128] = 0x3c00;
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    float d[4];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(place(A)), "l"(place(B)), "r"(adds));
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = d[i];
}"""


def test_the_sums_of_a_wgmma_need_a_value_only_where_it_adds_to_them():
    kernel, y = simt.compile(WGMMA, arch="sm_90a")["k"], np.zeros(512, np.float32)
    kernel(1, 128, y, np.int32(0))
    assert (y == 16).all()
    with pytest.raises(simt.UnsetRegister, match="line 12 .*`d` is read before it is set"):
        kernel(1, 128, y, np.int32(1))


def test_guards_and_calls():
    """PTX by hand: a guarded write sets its lanes only; a value passes through a call; a guard must be set."""

    def run(body):
        text = f"""
          .version 8.0
          .target sm_90
          .address_size 64
          .func (.param .b32 out) same(.param .b32 in) {{
            .reg .b32 %r<2>; ld.param.b32 %r1, [in]; st.param.b32 [out], %r1; ret; }}
          .visible .entry k(.param .u64 y) {{ .reg .b32 %r<9>; .reg .pred %p<9>; .reg .b64 %rd<9>;
            ld.param.u64 %rd0, [y]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.s64 %rd0, %rd0, %rd1;
            setp.lt.u32 %p0, %r0, 10;
            {body}
            ret; }}"""
        y = np.zeros(64, np.int32)
        simt.load(text)["k"](1, 64, y)
        return y.tolist()

    call = "{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r1; call.uni (b), same, (a); ld.param.b32 %r2, [b]; }"
    assert run("@%p0 mov.u32 %r1, 7; @%p0 st.global.u32 [%rd0], %r1;") == [7] * 10 + [0] * 54
    assert run(f"@%p0 mov.u32 %r1, 7; {call} @%p0 st.global.u32 [%rd0], %r2;") == [7] * 10 + [0] * 54
    for body in (
        "@%p0 mov.u32 %r1, 7; st.global.u32 [%rd0], %r1;",
        f"@%p0 mov.u32 %r1, 7; {call} st.global.u32 [%rd0], %r2;",
        "@!%p0 setp.lt.u32 %p1, %r0, 99; mov.u32 %r1, 7; @%p1 st.global.u32 [%rd0], %r1;",
        "@%p0 ld.global.u32 %r1, [%rd0]; selp.b32 %r2, 4, %r1, %p0; add.s32 %r3, %r2, 1; st.global.u32 [%rd0], %r3;",
    ):
        with pytest.raises(simt.UnsetRegister, match=r"a variable is read before it is set; block \(0, 0, 0\), thread"):
            run(body)
    assert run("selp.b32 %r2, 4, %r1, %p0; @%p0 st.global.u32 [%rd0], %r2;") == [4] * 10 + [0] * 54


def test_who_speaks_of_nan():
    for text in ("x = NAN;", "-INFINITY", "CUDART_INF_F", "__int_as_float(0)", "0xff800000", "z = 0.0f / 0.0f;"):
        assert unset.SPEAKS_OF_NAN.search(text), text
    for text in ("__shfl_sync(0xffffffff, v, 0)", "__nanosleep(8)", "int info = x / 0.5f;", "n / 08", "0x7fff"):
        assert not unset.SPEAKS_OF_NAN.search(text), text


@pytest.mark.parametrize(
    "line, names",
    [
        (3, ["a"]),  # c has been set
        (4, ["b", "rest"]),
        (5, ["a"]),
        (6, []),
        (9, ["m"]),
        (10, ["m"]),  # not named there, but the only one that nothing has been assigned to
        (11, []),
    ],
)
def test_names(line, names):
    text = """float other() { float z; return z; }
__global__ void k(int n) { float a, c = 1; const float* p = 0;
    c = 2; a += c;
    float b[4][2], rest /* of it */; b[1][0] += rest;  // a is not here
    a++;
}
__device__ float g(unsigned int n) {
    long long unsigned m; __shared__ float tile[4]; return
        m + n + tile[0];
}"""
    assert declarations.variables(text, line) == names
