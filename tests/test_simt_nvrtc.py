"""The compiler: PTX and machine code without a GPU, and errors in the learner's own lines."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import simt
from simt import nvrtc
from simt.errors import CompileError, CompilerMissing

ROOT = Path(__file__).resolve().parent.parent
KERNEL = 'extern "C" __global__ void twice(float* x, int n) {\n  int i = threadIdx.x;\n  if (i < n) x[i] *= 2;\n}\n'

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")


def error(source, *args, **options):
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_to_ptx(source, *args, **options)
    return str(caught.value)


# What comes out


def test_ptx_with_lines_of_the_named_file():
    ptx = nvrtc.compile_to_ptx(KERNEL, name="twice.cu")
    assert ".visible .entry twice(" in ptx
    assert ".target sm_90" in ptx
    assert '.file\t1 "twice.cu"' in ptx, "the file's name, without a folder of this machine"
    assert ".loc\t1 3" in ptx
    assert not ptx.endswith("\0")


def test_a_folder_beyond_ascii_is_left_out_of_names_too(tmp_path, monkeypatch):
    (tmp_path / "ü b").mkdir()
    monkeypatch.chdir(tmp_path / "ü b")
    assert '.file\t1 "zwölf 2.cu"' in nvrtc.compile_to_ptx(KERNEL, name="zwölf 2.cu")


def test_cubin_is_machine_code_for_the_architecture():
    assert nvrtc.compile_to_cubin(KERNEL)[:4] == b"\x7fELF"
    assert nvrtc.compile_to_cubin(KERNEL, arch="sm_80") != nvrtc.compile_to_cubin(KERNEL)
    for arch in ("sm_80", "sm_90a", "sm_100", "sm_120"):
        assert f".target {arch}" in nvrtc.compile_to_ptx(KERNEL, arch=arch)


def test_without_the_assembler_the_ptx_is_the_same_and_the_machine_code_is_made_when_asked_for(monkeypatch):
    monkeypatch.setattr(nvrtc, "_compiled", {})
    alone = nvrtc.compile_to_ptx(KERNEL, ("-DN=7",), assembled=False)
    assert nvrtc.compile_to_cubin(KERNEL, ("-DN=7",))[:4] == b"\x7fELF"
    assert nvrtc.compile_to_ptx(KERNEL, ("-DN=7",)) == alone
    broken = KERNEL.replace("if (", 'asm("nonsense;"); if (')
    assert "nonsense" in nvrtc.compile_to_ptx(broken, assembled=False)
    assert "ptxas" in error(broken)
    assert "undefined" in error(KERNEL.replace("*= 2", "*= two"), assembled=False)


def test_options_reach_the_compiler():
    source = KERNEL.replace("2;", "FACTOR;")
    assert "1084227584" in nvrtc.compile_to_ptx(source, ("-DFACTOR=5",)) or "0f40A00000" in nvrtc.compile_to_ptx(
        source, ("-DFACTOR=5",)
    )
    cpp20 = "template <class T> concept every = true;\n" + KERNEL
    assert "concept" in error(cpp20)
    nvrtc.compile_to_ptx(cpp20, ("--std=c++20",))


def test_the_same_source_is_compiled_once(monkeypatch):
    asked = []
    monkeypatch.setenv("SIMT_KEEP_IN", "")
    monkeypatch.setattr(nvrtc, "_compiled", {})
    monkeypatch.setattr(nvrtc, "_ask", lambda *args: asked.append(args) or ("ptx", b"cubin", "log"))
    for source, options in ((KERNEL, ()), (KERNEL, []), (KERNEL, ("-DN=1",)), (KERNEL + " ", ()), (KERNEL, ("-DN=1",))):
        nvrtc.compile_to_ptx(source, options)
        nvrtc.compile_to_cubin(source, options)
    assert len(asked) == 3
    nvrtc.compile_to_ptx(KERNEL, arch="sm_80")
    assert len(asked) == 4


def test_what_includes_cuda_is_kept_where_cudas_headers_are_below_the_folder_too(tmp_path, monkeypatch):
    """As in a checkout with its .venv, whose tests run in the folder of both."""
    compiled, source = [], "#include <cuda_fp16.h>\n" + KERNEL.replace("2;", "__half2float(__half(3));")
    ask = nvrtc._ask
    monkeypatch.setenv("SIMT_KEEP_IN", str(tmp_path / "kept"))
    monkeypatch.setattr(nvrtc, "_ask", lambda *args: compiled.append(args) or ask(*args))
    here = tmp_path.resolve()
    monkeypatch.chdir(here)
    folders = [here / f"headers {n}" for n, _ in enumerate(nvrtc.include_folders())]
    for folder, cudas in zip(folders, nvrtc.include_folders()):
        folder.symlink_to(cudas)
    monkeypatch.setattr(nvrtc, "include_folders", lambda: list(map(str, folders)))
    for _ in range(2):  # two processes
        monkeypatch.setattr(nvrtc, "_compiled", {})
        assert "cuda_fp16.h" in nvrtc.compile_to_ptx(source)
    assert len(compiled) == 1


def test_a_changed_header_is_compiled_again(tmp_path):
    (tmp_path / "factor.h").write_text('#include "deeper.h"\n')
    (tmp_path / "deeper.h").write_text("#define FACTOR 5.0f\n")
    source, options = '#include "factor.h"\n' + KERNEL.replace("2;", "FACTOR;"), (f"-I{tmp_path}",)
    before = nvrtc.compile_to_ptx(source, options)
    (tmp_path / "deeper.h").write_text("#define FACTOR 7.0f\n")
    assert nvrtc.compile_to_ptx(source, options) != before


def test_a_changed_header_of_a_header_in_another_folder_is_compiled_again(tmp_path):
    (tmp_path / "topic").mkdir()
    (tmp_path / "device").mkdir()
    (tmp_path / "device/factor.h").write_text('#include "deeper.h"\n')  # beside it, not beside the source
    (tmp_path / "device/deeper.h").write_text("#define FACTOR 5.0f\n")
    source, name = '#include "../device/factor.h"\n' + KERNEL.replace("2;", "FACTOR;"), f"{tmp_path}/topic/kernel.cu"
    before = nvrtc.compile_to_ptx(source, name=name)
    (tmp_path / "device/deeper.h").write_text("#define FACTOR 7.0f\n")
    assert nvrtc.compile_to_ptx(source, name=name) != before


@pytest.mark.parametrize(
    "header",
    "cuda_fp16.h cuda_bf16.h cuda_fp8.h mma.h cooperative_groups.h cuda/std/cstdint cuda/std/limits "
    "stdint.h cstdint math.h cmath float.h cfloat limits.h climits stddef.h stdio.h cassert string.h cstdlib".split(),
)
def test_headers(header):
    nvrtc.compile_to_ptx(f"#include <{header}>\n" + KERNEL)


def test_what_c_has_in_its_headers():
    """Alone, and before or after the headers of CUDA's own library that define the same names."""
    own = "#include <math.h>\n#include <float.h>\n#include <limits.h>\n#include <stdint.h>\n#include <stddef.h>\n"
    theirs = "#include <cuda/std/cstdint>\n#include <cuda/std/limits>\n#include <cooperative_groups.h>\n"
    checks = (
        "".join(
            f"static_assert(sizeof({sign}int{8 * size}_t) == {size}); \n"
            f"static_assert(({sign}int{8 * size}_t)-1 {'>' if sign else '<'} 0); \n"
            for size in (1, 2, 4, 8)
            for sign in ("", "u")
        )
        + "static_assert(sizeof(uintptr_t) == 8 && sizeof(intptr_t) == 8 && sizeof(ptrdiff_t) == 8);\n"
    )
    names = "INFINITY NAN FLT_MAX FLT_EPSILON INT_MAX UINT32_MAX INT64_MIN".split()
    uses = "".join(f"  x[0] += (float){name};\n" for name in names)
    body = f'extern "C" __global__ void k(float* x, size_t n) {{\n{uses}  assert(n > 0);\n  printf("%f", x[0]);\n}}\n'
    for headers in (own, own + theirs, theirs + own):
        nvrtc.compile_to_ptx(headers + checks + body)


def test_warnings_are_dropped_unless_asked_for(capfd):
    source = KERNEL.replace("int i", "int unused; int i")
    nvrtc.compile_to_ptx(source)
    assert capfd.readouterr() == ("", "")
    assert "kernel.cu(2): warning" in nvrtc.compiler_log(source)
    assert "Used" in nvrtc.compiler_log(source, ("--ptxas-options=-v",))


# What goes wrong


def test_errors_show_file_line_text_and_caret():
    assert error(KERNEL.replace("*= 2", "*= two"), name="twice.cu") == (
        "twice.cu does not compile:\n"
        'twice.cu:3: error: identifier "two" is undefined\n'
        "    if (i < n) x[i] *= two;\n"
        "                       ^"
    )


def test_a_syntax_error():
    assert 'kernel.cu:4: error: expected a ";"\n  }\n  ^' in error(KERNEL.replace("2;", "2"))
    assert "at the end of the source: error: " in error(KERNEL.replace("\n}", "\n"))


def test_a_variable_that_nothing_can_have_set():
    """A warning to NVRTC. Its optimiser takes the unset value for anything, and nothing is left to see in the PTX."""
    body = "  float sum;\n  sum += x[i];\n  x[i] = sum;"
    assert error(KERNEL.replace("  if (i < n) x[i] *= 2;", body)) == (
        "kernel.cu does not compile:\n"
        'kernel.cu:4: error: variable "sum" is used before its value is set\n'
        "    sum += x[i];\n"
        "    ^"
    )
    for fine in (
        "float sum; if (i < n) sum = 1; x[i] = sum;",
        'float sum; asm("mov.f32 %0, %1;" : "+f"(sum) : "f"(1.0f));',
    ):
        nvrtc.compile_to_ptx(
            KERNEL.replace("if (i < n) x[i] *= 2;", fine)
        )  # may be set, or may not be read: seen when it runs


def test_three_errors_at_most():
    said = error(KERNEL.replace("*= 2", "*= a + b + c + d + e"))
    assert said.count("error:") == 3
    assert said.endswith("... and 2 more")


def test_header_noise_is_left_out():
    source = "#include <cuda_fp16.h>\n" + KERNEL.replace("float* x", "half* x").replace("*= 2", '= x[i] * "two"')
    said = error(source)
    assert said.startswith('kernel.cu does not compile:\nkernel.cu:4: error: no operator "*" matches these operands')
    assert "note" not in said and "cuda_fp16" not in said
    assert len(said.split("\n")) == 5


def test_the_learners_file_comes_before_headers(tmp_path):
    (tmp_path / "broken.h").write_text("float f() { return nothing; }\n")
    said = error('#include "broken.h"\n' + KERNEL.replace("2;", "two;"), (f"-I{tmp_path}",))
    assert said.index("kernel.cu:4: error") < said.index("broken.h:1: error")
    assert "two" in said and "nothing" in said


def test_a_missing_header():
    said = error('#include "mine.h"\n' + KERNEL)
    assert 'kernel.cu:1: error: cannot open source file "mine.h"' in said
    assert "hint" not in said


def test_names_that_nvcc_knows_without_a_header():
    names = "-INFINITY INT_MAX M_PI UINT32_MAX FLT_MAX CHAR_BIT (uint)7 (int8_t)300 (float)isnan(NAN)".split()
    lines = "".join(f"  y[{n}] = {name};\n" for n, name in enumerate(names))
    y = np.zeros(len(names))
    simt.compile(f'extern "C" __global__ void k(double* y) {{\n{lines}}}')["k"](1, 1, y)
    assert y.tolist() == [-np.inf, 2**31 - 1, np.pi, 2**32 - 1, np.finfo(np.float32).max, 8, 7, 44, 1]
    own = "#define INFINITY 3\ntypedef unsigned long uint64_t;\n" + KERNEL.replace("2;", "INFINITY;")
    assert ".visible .entry twice(" in nvrtc.compile_to_ptx(own)  # a source that has its own is left alone
    assert '"gone" is undefined' in error(KERNEL.replace("2;", "NAN * gone;"))


def test_what_cplusplus_has_in_its_headers():
    """Functions of <cmath> at once; the rest of namespace std comes from CUDA's own libcu++."""
    source = """
#include <cmath>
#include <cstdint>
#include <limits>
extern "C" __global__ void k(float* y, std::uint32_t n) {
  y[0] = std::sqrt(y[1]) + std::abs(y[2]) + std::isnan(y[3]) + std::numeric_limits<float>::infinity() + n;
}"""
    assert "sqrt.rn.f32" in nvrtc.compile_to_ptx(source)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("half f();", "#include <cuda_fp16.h>"),
        ("float f(float x) { return __half2float(x); }", "#include <cuda_fp16.h>"),
        ("__nv_bfloat16 f();", "#include <cuda_bf16.h>"),
        ("float f() { return CUDART_INF_F; }", "#include <math_constants.h>"),
        ("using namespace nvcuda;", "#include <mma.h>"),
        ("namespace cg = cooperative_groups;", "#include <cooperative_groups.h>"),
        ("int f() { return cuda::std::max(1, 2); }", "#include <cuda/std/"),
        ("int f() { return std::max(1, 2); }", "CUDA's own max(a, b)"),
        ("float2 f(float2 a) { return a + a; }", "CUDA has no arithmetic on float2"),
        ("__int128 f();", "--device-int128"),
        ("float f(float x) { return __shfl_down(x, 16); }", "__shfl_down_sync(0xffffffff"),
        ("texture<float, 2> image;", "there are no textures: pass the array"),
        ("#include <curand_kernel.h>", "random numbers made by NumPy"),
        ("int f() { return cuda::make_pipeline(); }", "#include <cuda/barrier>, and so on for cuda::pipeline"),
        ("int f() { return cub::BlockReduce<int, 32>(); }", "declared by <cub/block/block_reduce.cuh>"),
        ("#include <cub/util_macro.cuh>\nauto f() { return cub::Max(); }", "cuda::maximum<>"),
    ],
)
def test_what_is_not_declared_gets_a_hint(line, hint):
    said = error(f"{KERNEL}{line}\n")
    assert said.count("hint:") == 1 and hint in said.partition("hint:")[2]


@pytest.mark.parametrize(
    "host",
    [
        "#include <iostream>\n",
        "#include <vector>\n",
        "int main() {\n  twice<<<1, 32>>>(nullptr, 0);\n}\n",
        "void run(float* x) {\n  cudaMalloc(&x, 4);\n}\n",
        "void run(float* x) {\n  std::vector<float> y;\n}\n",
        "#include <helper_cuda.h>\n",
        "#include <cublas_v2.h>\n",
        "void run(float* x) {\n  cub::DeviceReduce::Sum(x);\n}\n",
    ],
)
def test_host_code_gets_a_hint(host):
    assert "hint: this is compiled as device code only" in error(KERNEL + host)
    assert "hint" not in error(f"#ifndef __CUDACC_RTC__\n{host}#endif\n" + KERNEL.replace("2;", "two;"))
    nvrtc.compile_to_ptx(f"#ifndef __CUDACC_RTC__\n{host}#endif\n" + KERNEL)


def test_inline_assembly_and_too_much_shared_memory():
    assert "ptxas: Not a name of any known instruction: 'nonsense'" in error(
        KERNEL.replace("if (", 'asm("nonsense;"); if (')
    )
    source = KERNEL.replace("int i", "__shared__ volatile float tile[100000]; tile[n] = 1; int i")
    assert "too much shared data" in error(source)


def test_wrong_options():
    said = error(KERNEL, ("-DN=1", "-bogus"))
    assert said == (
        "kernel.cu does not compile: NVRTC refused its options: unrecognized option -bogus found "
        "(they were ['-DN=1', '-bogus'])"
    )


@pytest.mark.parametrize("arch", ["sm_1", "90", "compute_90", "", "sm_90b", "sm_90aa", "SM_90"])
def test_wrong_architecture(arch):
    with pytest.raises(ValueError, match=r"arch must be .*sm_80, .*sm_90, .*got '"):
        nvrtc.compile_to_ptx(KERNEL, arch=arch)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((None,), TypeError, "source must be a str, got NoneType"),
        ((b"code",), TypeError, "source must be a str, got bytes"),
        ((Path("kernel.cu"),), TypeError, "source must be a str, got PosixPath"),
        ((KERNEL, "-DN=1"), TypeError, "options must be a tuple of strings"),
        ((KERNEL, None), TypeError, "options must be a tuple of strings"),
        ((KERNEL, (1,)), TypeError, "options must be strings, got 1"),
        ((KERNEL, (), 90), TypeError, "arch must be a str, got int"),
        ((KERNEL, (), "sm_90", None), TypeError, "name must be a str"),
        ((KERNEL + "\0int x;",), ValueError, "source holds a null character"),
        (("",), CompileError, "the source is empty"),
        (("\n \n",), CompileError, "the source is empty"),
    ],
)
def test_wrong_arguments(arguments, kind, said):
    with pytest.raises(kind, match=said):
        nvrtc.compile_to_ptx(*arguments)


def test_the_log_is_kept_whole():
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_to_ptx(KERNEL.replace("*= 2", "*= a + b + c + d + e"))
    assert caught.value.log.count("error:") == 5


def test_without_the_binding():
    """simt.nvrtc can be imported, and says what works without a compiler."""
    program = (
        "import sys; sys.modules['cuda.bindings'] = None\n"
        "from simt import nvrtc, errors\n"
        "try: nvrtc.compile_to_ptx('x')\n"
        "except errors.CompilerMissing as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "NVRTC, and it was not found" in done.stdout, done.stderr
    assert "simt.load(ptx) runs a kernel from its PTX text" in done.stdout


def test_without_the_library(monkeypatch):
    from cuda.bindings import nvrtc as binding

    def missing():
        raise RuntimeError("Failure finding libnvrtc.so\nSearched: ...")

    monkeypatch.setattr(binding, "nvrtcVersion", missing)
    nvrtc._load.cache_clear()
    try:
        with pytest.raises(CompilerMissing, match=r"not found \(Failure finding libnvrtc.so\): pip install"):
            nvrtc.compile_to_ptx(KERNEL + "// not in the memory")
    finally:
        nvrtc._load.cache_clear()


def test_the_import_is_light():
    program = "import sys, simt.nvrtc; print([m for m in sys.modules if m.startswith(('cuda', 'torch', 'nvidia'))])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.stdout.strip() == "[]", done.stderr
