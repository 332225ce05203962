"""The compiler: errors name the learner's line, arguments are checked, no half file is kept."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lab import CompileError, NoCompiler, compile_c, compiler

ROOT = Path(__file__).resolve().parent.parent
SCALE = "void scale(float *x, int64_t n, float by) { for (int64_t i = 0; i < n; i++) x[i] *= by; }"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled libraries."""
    folder = tmp_path / "build"
    folder.mkdir()
    monkeypatch.setattr(compiler, "build_folder", lambda: folder)
    return folder


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def use_compiler(monkeypatch, path):
    monkeypatch.setattr(compiler, "find_compiler", lambda: [str(path)])
    monkeypatch.setattr(compiler, "compiler_version", lambda: "planted")


def build(source, **options):
    return compile_c(source, **{"openmp": False, **options})


# Compile and call


def test_compile_and_call(cache):
    x = np.arange(5, dtype=np.float32)
    assert build(SCALE).scale(x, x.size, 2) is None
    assert x.tolist() == [0, 2, 4, 6, 8]
    assert [p.suffix for p in cache.iterdir()] == [".so"]


def test_threads_run(cache):
    source = """
        #include <omp.h>
        int count(int threads) {
            int found = 0;
            #pragma omp parallel num_threads(threads) reduction(+ : found)
            found += 1;
            return found;
        }"""
    if not compiler.openmp_flags():
        pytest.skip("this compiler has no OpenMP")
    assert compile_c(source).count(3) == 3


def test_headers_and_flags_reach_the_compiler(cache, tmp_path):
    (tmp_path / "ten.h").write_text('#include "inner.h"\n#define TEN (INNER + 4)\n')
    (tmp_path / "inner.h").write_text("#define INNER 6\n")
    headers = [tmp_path / "ten.h", tmp_path / "inner.h"]
    source = '#include "ten.h"\nint ten(void) { return TEN + MORE; }'
    assert build(source, headers=headers, flags=["-DMORE=0"]).ten() == 10
    assert build(source, headers=headers, flags=["-DMORE=1"]).ten() == 11
    (tmp_path / "inner.h").write_text("#define INNER 16\n")
    assert build(source, headers=headers, flags=["-DMORE=0"]).ten() == 20
    with pytest.raises(CompileError, match="inner.h"):
        build(source, headers=headers[:1], flags=["-DMORE=2"])


def test_a_file_is_compiled_under_its_own_name(cache, tmp_path):
    path = tmp_path / "dot.c"
    path.write_text("int one(void) { return 1; }")
    assert build(path).one() == 1
    assert [p.name.split("-")[0] for p in cache.iterdir()] == ["dot"]
    path.write_text("\n\nint one(void) { return x; }")
    with pytest.raises(CompileError, match=r"dot\.c:3:"):
        build(path)


def test_a_half_is_sixteen_bits_of_a_float16_array(cache):
    library = build("int bits(const half *x, int64_t i) { return x[i]; }")
    assert library.bits(np.array([0, 1, -2], np.float16), 1) == 0x3C00


def test_results_of_every_type(cache):
    source = "\n".join(f"{kind} get_{kind}(void) {{ return ({kind})-1; }}" for kind in compiler.TYPES if kind != "half")
    library = build(source)
    for kind, (_, dtype) in compiler.TYPES.items():
        if kind != "half":
            assert library.__getattr__(f"get_{kind}")() == np.array(-1).astype(dtype), kind


# What the compiler says


def machine_paths(text):
    return [word for word in text.split() if word.startswith(("/", str(ROOT)))]


@pytest.mark.parametrize(
    ("source", "place", "excerpt"),
    [
        ("int f(int x) {\n    return x +;\n}", "source.c:2:", "return x +;"),
        ("int f(int x) { return x; }\n\n\nint g(void) { return nowhere; }", "source.c:4:", "return nowhere;"),
        ("float f(float x) {\n    float y = fabsff(x);\n    return y;\n}", "source.c:2:", "fabsff(x)"),
        ('#error "not done yet"', "source.c:1:", "not done yet"),
        ('int x;\n#include "nowhere.h"', "source.c:2:", "nowhere.h"),
        ("int f(int x) {\n    return x;\n", "source.c:2:", "expected"),
    ],
)
def test_errors_name_and_show_the_learners_own_line(cache, source, place, excerpt):
    with pytest.raises(CompileError) as caught:
        build(source)
    said = str(caught.value)
    assert said.startswith("source.c does not compile:\n")
    assert place in said and excerpt in said
    assert not machine_paths(said)
    assert list(cache.iterdir()) == []


def test_the_cells_name_is_used(cache):
    with pytest.raises(CompileError, match=r"^my_dot\.c does not compile:(.|\n)*my_dot\.c:1:"):
        build("int", name="my_dot.c")


def test_an_error_in_a_header_names_no_machine_path_either(cache, tmp_path):
    (tmp_path / "bad.h").write_text("int f(void) { return 1 }\n")
    with pytest.raises(CompileError) as caught:
        build('#include "bad.h"', headers=[tmp_path / "bad.h"])
    assert "bad.h:1:" in str(caught.value) and not machine_paths(str(caught.value))


def test_an_error_in_a_system_header_names_no_machine_path(cache, monkeypatch, tmp_path):
    said = (
        "In file included from /usr/lib/gcc/include/immintrin.h:43,\\n                 from dot.c:1:\\n"
        "/usr/lib/gcc/include/fmaintrin.h:63:1: error: inlining failed\\n    7 | a /b/ c"
    )
    use_compiler(monkeypatch, script(tmp_path / "cc", f'printf "{said}" >&2; exit 1'))
    with pytest.raises(CompileError) as caught:
        build("")
    lines = str(caught.value).splitlines()
    assert lines[1] == "In file included from immintrin.h:43,"
    assert lines[3:] == ["fmaintrin.h:63:1: error: inlining failed", "    7 | a /b/ c"]


def test_a_function_that_is_nowhere_defined(cache):
    with pytest.raises(CompileError, match="source.c does not load: .*nowhere") as caught:
        build("float nowhere(float);\nfloat f(float x) { return nowhere(x); }")
    assert not machine_paths(str(caught.value))


# No compiler


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name, path=None: None)
    monkeypatch.delenv("CC", raising=False)
    for cached in (compiler.find_compiler, compiler.compiler_version):
        cached.cache_clear()
    yield
    for cached in (compiler.find_compiler, compiler.compiler_version):
        cached.cache_clear()


def test_no_compiler_is_one_clear_error(no_compiler, cache):
    with pytest.raises(NoCompiler) as caught:
        compile_c(SCALE)
    said = str(caught.value)
    assert "found none (looked for cc, gcc and clang)" in said and "apt install" in said
    assert "\n" not in said and list(cache.iterdir()) == []


def test_a_compiler_named_in_cc_is_used_and_nothing_else(no_compiler, monkeypatch):
    monkeypatch.setenv("CC", "my-cc -m64")
    with pytest.raises(NoCompiler, match="CC=my-cc -m64 is not there"):
        compiler.find_compiler()
    monkeypatch.setattr(compiler.shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(compiler.bootstrap, "try_compiler", lambda command, env: None)
    compiler.find_compiler.cache_clear()
    assert compiler.find_compiler() == ["my-cc", "-m64"]


def test_a_compiler_that_does_not_work_is_passed_over(no_compiler, monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(
        compiler.bootstrap, "try_compiler", lambda command, env: "broken" if command == ["cc"] else None
    )
    assert compiler.find_compiler() == ["gcc"]


def test_without_openmp_there_is_one_thread_and_a_note(monkeypatch, capsys):
    def refuse(*_):
        raise CompileError("unsupported option '-fopenmp'")

    monkeypatch.setattr(compiler, "_build", refuse)
    assert compiler.openmp_flags.__wrapped__() == ()
    assert "one thread" in capsys.readouterr().out


# Arguments

ADD = """
void add(const float *a, const float *b, float *out, int n, double by) {
    for (int i = 0; i < n; i++) out[i] = a[i] + b[i] + by;
}
int same_int(int n) { return n; }
uint8_t same_byte(uint8_t n) { return n; }
uint64_t same_long(uint64_t n) { return n; }
float same_float(float x) { return x; }
"""


@pytest.fixture(scope="module")
def library():
    return compile_c(ADD, name="arguments.c", openmp=False)


def arrays(n=4):
    return [np.ones(n, np.float32), np.full(n, 2, np.float32), np.full(n, -1, np.float32)]


@pytest.mark.parametrize(
    ("place", "value", "error", "said"),
    [
        (
            0,
            np.ones(4),
            TypeError,
            ["add: a must be a float32 array of shape (4,), got float64 (4,)"],
        ),
        (0, np.ones(4, ">f4"), TypeError, ["a must be", "float32", "got >f4"]),
        (1, [1.0, 2.0, 3.0, 4.0], TypeError, ["add: b must be a NumPy float32 array", "got list"]),
        (1, None, TypeError, ["b must be", "got NoneType"]),
        (1, np.float32(1), TypeError, ["b must be", "got float32"]),
        (0, np.ones(8, np.float32)[::2], ValueError, ["a must be C-contiguous", "strides (8,)"]),
        (1, np.ones((4, 4), np.float32).T[:, 1:], ValueError, ["b must be C-contiguous"]),
        (2, np.broadcast_to(np.float32(0), 4).copy()[::-1], ValueError, ["out must be C-contiguous"]),
        (0, np.zeros(17, np.int8)[1:].view(np.float32), ValueError, ["a must be aligned"]),
        (3, 4.0, TypeError, ["add: n must be a whole number, got 4.0"]),
        (3, np.float64(4), TypeError, ["n must be a whole number"]),
        (3, True, TypeError, ["n must be a whole number, got True"]),
        (3, np.True_, TypeError, ["n must be a whole number"]),
        (3, "4", TypeError, ["n must be a whole number, got '4'"]),
        (3, None, TypeError, ["n must be a whole number, got None"]),
        (3, 1 << 31, ValueError, ["n = 2147483648 does not fit in int"]),
        (3, -(1 << 31) - 1, ValueError, ["does not fit in int"]),
        (4, "1", TypeError, ["add: by must be a number, got '1'"]),
        (4, None, TypeError, ["by must be a number, got None"]),
        (4, False, TypeError, ["by must be a number, got False"]),
        (4, np.ones(1), TypeError, ["by must be a number"]),
        (4, 1j, TypeError, ["by must be a number"]),
    ],
)
def test_wrong_arguments(library, place, value, error, said):
    a, b, out = arrays()
    args = [a, b, out, 4, 0.0]
    args[place] = value
    with pytest.raises(error) as caught:
        library.add(*args)
    assert all(part in str(caught.value) for part in said)
    assert (out == -1).all()


def test_an_output_must_be_writeable_and_an_input_need_not(library):
    a, b, out = arrays()
    a.flags.writeable = False
    library.add(a, b, out, 4, 0)
    assert out.tolist() == [3] * 4
    out.flags.writeable = False
    with pytest.raises(ValueError, match="add: out must be writeable, got a read-only array"):
        library.add(a, b, out, 4, 9)
    assert out.tolist() == [3] * 4


@pytest.mark.parametrize("count", [0, 4, 6])
def test_a_wrong_number_of_arguments(library, count):
    with pytest.raises(TypeError, match=rf"add: takes 5 arguments \(a, b, out, n, by\), got {count}"):
        library.add(*[0] * count)


def test_right_arguments_of_every_kind(library):
    a, b, out = arrays()
    for n in (4, np.int64(4), np.int8(4), np.uint16(4)):
        for by in (0.5, np.float32(0.5), np.float64(0.5), np.float16(0.5)):
            out[:] = 0
            library.add(a, b, out, n, by)
            assert out.tolist() == [3.5] * 4
    library.add(a.reshape(2, 2), b.reshape(1, 4), out.reshape(4, 1), 4, 1)  # sizes are arguments of their own
    assert out.tolist() == [4] * 4
    library.add(np.empty(0, np.float32), np.empty((0, 3), np.float32), np.empty(0, np.float32), 0, 1)


@pytest.mark.parametrize("name", ["same_int", "same_byte", "same_long"])
def test_integers_pass_up_to_their_limits_and_no_further(library, name):
    dtype = {"same_int": np.int32, "same_byte": np.uint8, "same_long": np.uint64}[name]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    same = getattr(library, name)
    assert (same(low), same(high)) == (low, high)
    for n in (low - 1, high + 1):
        with pytest.raises(ValueError, match="does not fit"):
            same(n)


def test_a_function_that_is_not_there_is_named_with_those_that_are(library):
    with pytest.raises(AttributeError, match="arguments.c has no public function 'sum'; it has: add, same_int"):
        library.sum  # noqa: B018
    assert not hasattr(library, "_hidden")


# Prototypes


def parsed(source):
    """What the parser finds in C source, written as prototypes again."""

    def written(kind, pointer, const, name):
        return f"{'const ' * const}{kind} {'*' * pointer}{name}"

    return [
        f"{returns} {name}({', '.join(written(*p) for p in parameters)})"
        for name, (returns, parameters) in compiler._prototypes(source)
    ]


F, G = "int f(int n)", "int g(int n)"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("void f(void) {}", ["void f()"]),
        ("void f() {}", ["void f()"]),
        ("void\nf(const float *x,\n  float *y,\n  int n)\n{\n}", ["void f(const float *x, float *y, int n)"]),
        ("int f(int n /* at (most) 9, */, // and {\n float x) {}", ["int f(int n, float x)"]),
        ("void f(float const *a, const float*b) {}", ["void f(const float *a, const float *b)"]),
        ("void f(float* a, float *b) {}", ["void f(float *a, float *b)"]),
        ("void f(const half *const restrict a, half *restrict b) {}", ["void f(const half *a, half *b)"]),
        ("void f(const half *__restrict a, half *__restrict__ b) {}", ["void f(const half *a, half *b)"]),
        ("void f(float x[], const half y[16]) {}", ["void f(float *x, const half *y)"]),
        ("float f(const int64_t n) {}", ["float f(const int64_t n)"]),
        ("__attribute__((noinline)) int f(int n) {}", [F]),
        ("const int f(int n) {}", [F]),
        ("int f(int n) { if (n) { return 1; } for (int i = 0; i < n; i++) {} }", [F]),
        # not public
        ("static int f(int n) {}", []),
        ("static inline int f(int n) {}", []),
        ("inline static int f(int n) {}", []),
        ("static const int f(int n) {}", []),
        ("static int f(int n) {}\nint g(int n) { return f(n); }", [G]),
        # declared only
        ("int f(int n);\nint g(int n) { return f(n); }", [G]),
        # types that cannot be passed are left alone, and never mistaken for others
        ("unsigned int f(int n) {}", []),
        ("long int f(int n) {}", []),
        ("void f(unsigned int n) {}", []),
        ("int16_t f(int n) {}\nint f(int16_t n) {}", []),
        ("void f(long n, float **x, char *s) {}\nint g(int n) {}", [G]),
        ("float *f(float *x) { return x; }", []),
        # macros, strings, comments
        ("#define TWICE(x) int f(int x) { return 2 * x; }\nint g(int n) {}", [G]),
        ("#define MAKE(name) \\\n  int name(int n) { \\\n return n; }\nint g(int n) {}", [G]),
        ("#if 1\nint f(int n) {}\n#endif", [F]),
        ('int f(int n) { puts("/*"); }\nint g(int n) { puts("*/"); }', [F, G]),
        ('int f(int n) { puts("// \\" {"); }\nint g(int n) {}', [F, G]),
        ("int f(int n) { char c = '\"'; }\nint g(int n) { char c = '\"'; }", [F, G]),
        ("// int h(int n) {\n/* int f(int n) { */ int g(int n) {}", [G]),
    ],
)
def test_prototypes(source, found):
    assert parsed(source) == found


def test_every_function_found_in_odd_but_legal_c_can_be_called(cache):
    library = build("""
        #define N 4 /* a macro { */
        #define HELPER(name) \\
            static float name(float x) { return x; }
        HELPER(same)
        static const float half_of(float x) { return x / 2; }
        extern inline int unused(int n);
        void
        fill(float x[ /* N of them */ N],  // the output
             const float
             by)
        {
            for (int i = 0; i < N; i++) x[i] = same(half_of(by));
        }
    """)
    x = np.zeros(4, np.float32)
    library.fill(x, 3)
    assert x.tolist() == [1.5] * 4
    for hidden in ("same", "half_of", "unused", "HELPER"):
        with pytest.raises(AttributeError, match="it has: fill$"):
            getattr(library, hidden)


def test_a_function_that_the_preprocessor_took_away(cache):
    library = build("#if 0\nint f(int n) { return n; }\n#endif\nint g(int n) { return n; }")
    assert library.g(3) == 3
    with pytest.raises(AttributeError, match="source.c has no public function 'f'"):
        library.f  # noqa: B018


# The cache


def test_the_second_time_no_compiler_runs(cache, monkeypatch):
    build("int f(void) { return 1; }")

    def run(*_, **__):
        raise AssertionError("the compiler ran")

    monkeypatch.setattr(compiler.subprocess, "run", run)
    assert build("int f(void) { return 1; }").f() == 1
    for changed in ({"source": "int f(void) { return 2; }"}, {"flags": ("-O1",)}):
        with pytest.raises(AssertionError, match="the compiler ran"):
            build(**{"source": "int f(void) { return 1; }"} | changed)


def test_another_compiler_or_processor_compiles_anew(cache, monkeypatch):
    build(SCALE)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "cc 99")
    build(SCALE)
    monkeypatch.setattr(compiler, "features", lambda: "another")
    build(SCALE)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo half > out.so; echo 'no space left' >&2; exit 1", "no space left"),
        ("echo half > out.so; echo 'said on stdout'; exit 1", "said on stdout"),
        ("echo half > out.so; kill -9 $$", "the compiler ended with -9"),
        ("printf '\\377 x.c:1: error' >&2; exit 1", "x.c:1: error"),  # a message that is no UTF-8
    ],
)
def test_a_compiler_that_fails_or_is_killed_leaves_nothing(cache, monkeypatch, tmp_path, does, said):
    use_compiler(monkeypatch, script(tmp_path / "cc", does))
    with pytest.raises(CompileError, match=said):
        build(SCALE)
    assert list(cache.iterdir()) == []


def test_an_interrupt_while_compiling_leaves_nothing(cache, monkeypatch):
    compiler.compiler_version()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler.subprocess, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(SCALE)
    assert list(cache.iterdir()) == []


def test_a_full_disk_leaves_nothing(cache, monkeypatch):
    def half(source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.shutil, "copyfile", half)
    with pytest.raises(OSError, match="No space left"):
        build(SCALE)
    assert list(cache.iterdir()) == []


CHILD = """
import sys
from pathlib import Path
from lab import compiler
compiler.build_folder = lambda: Path(sys.argv[1])
compiler.find_compiler = lambda: [sys.argv[2]]
compiler.compiler_version = lambda: "planted"
print(compiler.compile_c("int answer(void) { return 42; }", openmp=False).answer())
"""


def test_two_processes_that_compile_the_same_at_once(cache, tmp_path):
    real = compiler.find_compiler()[0]
    (tmp_path / "at").mkdir()
    # each waits, before it compiles, until the other compiles too
    wait = f"""
        touch {tmp_path}/at/$$
        n=0
        while [ $(ls {tmp_path}/at | wc -l) -lt 2 ] && [ $n -lt 1200 ]; do n=$((n + 1)); sleep 0.1; done
        exec {real} "$@" """
    command = [sys.executable, "-c", CHILD, str(cache), script(tmp_path / "cc", wait)]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        out, errors = process.communicate(timeout=300)
        assert out == b"42\n", errors.decode()
    assert len(list((tmp_path / "at").iterdir())) == 2
    assert [p.suffix for p in cache.iterdir()] == [".so"]


# Where the cache is


def test_the_cache_is_in_the_courses_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "ROOT", tmp_path)
    assert compiler.build_folder.__wrapped__() == tmp_path / ".build"
    assert (tmp_path / ".build").is_dir() and list((tmp_path / ".build").iterdir()) == []
    assert compiler.build_folder.__wrapped__() == tmp_path / ".build"  # a second time
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("how", ["mkdir", "write"])
def test_a_read_only_folder_falls_back_with_a_notice(tmp_path, monkeypatch, capsys, how):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(compiler, "ROOT", tmp_path / "course")
    (tmp_path / "course").mkdir()
    if how == "mkdir":
        monkeypatch.setattr(compiler.Path, "mkdir", refuse)
    else:
        monkeypatch.setattr(compiler.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(tmp_path))
    folder = compiler.build_folder.__wrapped__()
    assert folder.parent == tmp_path and folder.is_dir()
    said = capsys.readouterr().out
    assert "read-only" in said and "temporary folder" in said and str(tmp_path) not in said
    monkeypatch.setattr(compiler, "build_folder", lambda: folder)
    assert build("int f(void) { return 5; }").f() == 5
    assert [p.suffix for p in folder.iterdir()] == [".so"]
