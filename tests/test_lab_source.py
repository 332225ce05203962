"""What `show` finds in a source, and which files a source includes."""

import pytest

from lab import results, show, source
from lab.source import inlined, with_includes

TOY = """/* Twice. */
#include "parts/more.cuh"
#include <cuda_fp16.h>
#include "nowhere.h"

template <int N> struct Sums {
    float of[N];

    /* All are zero.
       Twice over. */
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < N; i++) of[i] = 0;
    }
    // Their number.
    // It is known.
    template <int PART = 0> __device__ int count() const { return N; }
};

extern "C" __global__ void __launch_bounds__(256)
    twice(float *x, int n) {
    if (inside(x)) {
        clear(x);
    }
}
"""
MORE = """#include "deeper.cuh"
struct Others {
    __device__ int count() const { return 3; }
};
"""
DEEPER = """__device__ float half_of(float x) {
    return x / 2;
}
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    for name, text in (("toy.cu", TOY), ("parts/more.cuh", MORE), ("parts/deeper.cuh", DEEPER)):
        (tmp_path / "kernels" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kernels" / name).write_text(text)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    return tmp_path


def test_includes_of_includes_are_sources(course):
    wanted = ("kernels/toy.cu", "kernels/plan.py", "kernels/parts/more.cuh", "kernels/parts/deeper.cuh")
    assert with_includes("kernels/toy.cu", "kernels/plan.py", "kernels/toy.cu", root=course) == wanted


def test_every_header_of_the_kernels_is_found():
    for path in sorted(results.ROOT.glob("kernels/*/*.cu")):
        name = path.relative_to(results.ROOT).as_posix()
        text = path.read_text()
        assert len(with_includes(name)) >= 1 + text.count('#include "'), name


def test_a_source_with_its_headers_in_place(course):
    (course / "kernels/twice.cu").write_text('#include "parts/deeper.cuh"\n#include "toy.cu"\n')
    text = inlined("kernels/twice.cu")
    assert text.index(DEEPER) < text.index("struct Others") < text.index("struct Sums") and text.count(DEEPER) == 1
    assert [line for line in text.splitlines() if "#include" in line] == TOY.splitlines()[2:4]


def test_show_finds_a_function_and_what_stands_before_it(course):
    text = str(show("kernels/toy.cu", "twice"))
    assert text.startswith('extern "C" __global__') and text.endswith("\n}\n") and "clear(x);" in text


def test_show_finds_functions_of_a_struct_with_their_comments(course):
    clear = str(show("kernels/toy.cu", "clear")).splitlines()
    assert clear[0] == "/* All are zero." and clear[2] == "__device__ void clear() {" and clear[-1] == "}"
    assert "#pragma unroll" in clear and "    for (int i = 0; i < N; i++) of[i] = 0;" in clear
    count = str(show("kernels/toy.cu", "Sums::count")).splitlines()
    assert count[0] == "// Their number." and count[-1].endswith("{ return N; }") and len(count) == 3
    assert str(show("kernels/toy.cu", "Others::count")) == "__device__ int count() const { return 3; }\n"
    assert str(show("kernels/toy.cu", "Sums")).endswith("};\n")


def test_show_follows_includes_and_says_where_it_found_what(course):
    shown = show("kernels/toy.cu", "clear", "half_of")
    assert shown.title == "kernels/toy.cu, kernels/parts/deeper.cuh" and "return x / 2;" in str(shown)
    assert show("kernels/toy.cu", "half_of").title == "kernels/parts/deeper.cuh"


@pytest.mark.parametrize("name", ["inside", "half", "Sums::half_of", "Nothing::count"])
def test_what_is_not_defined_is_named(course, name):
    with pytest.raises(ValueError, match=f"show: kernels/toy.cu, and what it includes, define no '{name}'"):
        show("kernels/toy.cu", name)
