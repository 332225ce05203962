"""The smaller tools: argument checks, the machine, showing source, widgets, and how an exercise speaks."""

import html
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest

from lab import (
    CompileError,
    Exercise,
    compile_c,
    describe,
    expect_array,
    expect_count,
    explore,
    machine,
    plots,
    processor,
    show,
    source,
)
from lab.arguments import expect_apart
from ref import roofline

ROOT = Path(__file__).resolve().parent.parent

# Arguments


def expect(value, **changed):
    return expect_array("f", "x", value, **{"dtype": np.float32, "shape": ("rows", 3)} | changed)


def test_a_right_array_passes_as_it_is():
    x = np.zeros((2, 3), np.float32)
    assert expect(x) is None
    assert expect(x, shape=(2, 3)) is expect(x, shape=(np.int64(2), "cols")) is expect(x, writeable=True) is None
    assert expect(x, dtype=(np.float16, np.float32)) is expect(x, dtype=[np.float32]) is None
    assert expect(np.zeros((0, 3), np.float32)) is None
    assert expect(np.zeros((), np.float32), shape=()) is None


@pytest.mark.parametrize(
    ("value", "changed", "error", "message"),
    [
        ([[1.0]], {}, TypeError, "f: x must be a NumPy float32 array of shape (rows, 3), got list"),
        (np.zeros((2, 3)), {}, TypeError, "f: x must be a float32 array of shape (rows, 3), got float64 (2, 3)"),
        (
            np.zeros((2, 3), np.int8),
            {"dtype": (np.float16, np.float32)},
            TypeError,
            "f: x must be a float16 or float32 array of shape (rows, 3), got int8 (2, 3)",
        ),
        (
            np.zeros((2, 4), np.float32),
            {},
            ValueError,
            "f: x must be a float32 array of shape (rows, 3), got float32 (2, 4)",
        ),
        (
            np.zeros(3, np.float32),
            {"shape": (3, 1)},
            ValueError,
            "f: x must have 2 dimension(s), (3, 1), got float32 (3,)",
        ),
    ],
)
def test_a_wrong_array_is_one_sentence(value, changed, error, message):
    with pytest.raises(error) as caught:
        expect(value, **changed)
    assert str(caught.value) == message


def test_layouts_that_are_refused():
    x = np.zeros((3, 3), np.float32)
    with pytest.raises(ValueError, match=r"C-contiguous .* strides \(4, 12\); np.ascontiguousarray\(x\)"):
        expect(x.T)
    with pytest.raises(ValueError, match="aligned"):
        expect(np.zeros(37, np.int8)[1:].view(np.float32).reshape(3, 3))
    x.flags.writeable = False
    assert expect(x) is None
    with pytest.raises(ValueError, match="x must be writeable, got a read-only array"):
        expect(x, writeable=True)


@pytest.mark.parametrize("value", [1, 5, np.int64(3), np.uint8(4)])
def test_counts_pass_as_ints(value):
    got = expect_count("f", "n", value, high=5)
    assert got == value and type(got) is int


@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float32(1), "1", None, [1]])
def test_what_is_no_whole_number(value):
    with pytest.raises(TypeError, match="f: n must be a whole number, got "):
        expect_count("f", "n", value)


def test_counts_out_of_bounds():
    for value in (0, 6, -1):
        with pytest.raises(ValueError, match=f"f: n must be between 1 and 5, got {value}"):
            expect_count("f", "n", value, high=5)
    with pytest.raises(ValueError, match="f: n must be at least 0, got -1"):
        expect_count("f", "n", -1, low=0)
    assert expect_count("f", "n", 1 << 70) == 1 << 70 and expect_count("f", "n", 0, low=0) == 0


def test_outputs_must_lie_apart_from_inputs():
    home = np.zeros(10, np.float32)
    assert expect_apart("f", home[:5], a=home[5:], b=np.zeros(5)) is None
    for overlapping in (home, home[4:], home[4:5]):
        with pytest.raises(ValueError, match="f: out must not share memory with b"):
            expect_apart("f", home[:5], a=np.zeros(5), b=overlapping)


# The machine


def test_describe_names_the_processor_its_caches_and_what_the_rungs_use(monkeypatch, capsys):
    monkeypatch.setattr(machine, "cpu_name", lambda: "Some CPU")
    monkeypatch.setattr(machine, "thread_count", lambda: 4)
    monkeypatch.setattr(machine, "cache_bytes", lambda: {1: 32 << 10, 2: 1 << 20, 3: 33 << 20})
    for isas, said in ((("avx2", "portable"), "AVX2"), (("portable",), "portable C")):
        monkeypatch.setattr(machine, "isas", lambda isas=isas: isas)
        describe()
        first, second = capsys.readouterr().out.splitlines()
        assert first == "Some CPU, 4 threads; L1 32 KB, L2 1 MB, L3 33 MB"
        assert second.startswith(f"vector instructions: {said}")
    monkeypatch.setattr(machine, "cache_bytes", dict)
    describe()
    assert "caches unknown" in capsys.readouterr().out


def test_one_thread_is_no_plural(monkeypatch):
    monkeypatch.setattr(machine, "thread_count", lambda: 1)
    assert machine.card().endswith(", 1 thread")


def test_instruction_sets_come_best_first_and_portable_always(monkeypatch):
    assert list(machine.ISA_FLAGS) == list(machine.ISA_NAMES) == ["avx512", "avx2", "portable"]
    found = machine.isas()
    order = list(machine.ISA_FLAGS)
    assert list(found) == [isa for isa in order if isa in found] and found[-1] == "portable"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_instruction_sets_agree_with_the_systems_flags():
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    if not found:
        pytest.skip("another processor than x86")
    flags = set(found[1].split())
    avx2 = {"avx2", "fma", "f16c"} <= flags
    assert ("avx2" in machine.isas()) == avx2 and ("avx512" in machine.isas()) == (avx2 and "avx512f" in flags)


@pytest.mark.parametrize(("answer", "isas"), [(0, "portable"), (1, "avx2 portable"), (2, "avx512 avx2 portable")])
def test_instruction_sets_from_the_probes_answer(monkeypatch, answer, isas):
    library = SimpleNamespace(isa=lambda: answer)
    monkeypatch.setattr(machine, "compile_c", lambda *_, **__: library)
    assert machine.isas.__wrapped__() == tuple(isas.split())


@pytest.mark.parametrize(
    ("system", "name"),
    [
        ("Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", "Intel Xeon Gold 6230"),
        ("AMD EPYC 7702P 64-Core Processor", "AMD EPYC 7702P"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "AMD Ryzen 9 7950X"),
    ],
)
def test_the_processors_name_without_its_trimmings(monkeypatch, system, name):
    monkeypatch.setattr(processor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(processor.Path, "read_text", lambda self: f"processor\t: 0\nmodel name\t: {system}\nflags: a\n")
    assert processor.cpu_name.__wrapped__() == name


def test_a_processor_without_a_name(monkeypatch):
    monkeypatch.setattr(processor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(processor.Path, "read_text", lambda self: "processor\t: 0\n")
    assert processor.cpu_name.__wrapped__() == (processor.platform.processor() or processor.platform.machine())

    def fails(*_, **__):
        raise subprocess.SubprocessError

    monkeypatch.setattr(processor.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(processor.subprocess, "run", fails)
    assert processor.cpu_name.__wrapped__()


def test_threads_are_those_this_process_may_use(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 5, 7}, raising=False)
    assert machine.thread_count() == 3
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: None)
    assert machine.thread_count() == 1


@pytest.fixture
def four_cores(monkeypatch, tmp_path):
    """A system with four cores, of which two and two share a third-level cache."""
    real = Path
    caches = [("Data", 1, "48K"), ("Instruction", 1, "32K"), ("Unified", 2, "2048K"), ("Unified", 3, "36M")]
    for core in range(4):
        for i, (kind, level, size) in enumerate([*caches, ("Unified", 4, "strange")]):
            shared = f"{core // 2 * 2}-{core // 2 * 2 + 1}" if level == 3 else f"{core}"
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{i}"
            folder.mkdir(parents=True)
            for name, text in {"type": kind, "level": level, "size": size, "shared_cpu_list": shared}.items():
                (folder / name).write_text(f"{text}\n")
        (folder.parent / "index9").mkdir()  # that tells nothing
    monkeypatch.setattr(machine, "Path", lambda path: real(f"{tmp_path}{path}"))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    return tmp_path


def test_caches_are_read_from_the_system(four_cores):
    assert machine.cache_bytes.__wrapped__() == {1: 48 << 10, 2: 2 << 20, 3: 36 << 20}
    assert machine.all_caches_bytes.__wrapped__() == 2 * (36 << 20)  # not four times, and not once


def test_threads_are_no_more_than_the_container_or_the_user_allows(four_cores, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine.thread_count() == 4
    quota = four_cores / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    quota.write_text("max 100000\n")
    assert machine.thread_count() == 4
    quota.write_text("150000 100000\n")
    assert machine.thread_count() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine.thread_count() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "nonsense")
    assert machine.thread_count() == 2


# Showing source


def test_show_a_file():
    shown = show("kernels/cpu_gemv/naive.c")
    text = (ROOT / "kernels/cpu_gemv/naive.c").read_text()
    assert repr(shown) == text
    page = shown._repr_html_()
    assert "kernels/cpu_gemv/naive.c" in page and str(ROOT) not in page
    (code,) = re.search(r"<pre[^>]*><code[^>]*>(.*)</code></pre>", page, re.S).groups()
    assert "font" not in page and re.search(r"<b style=[^>]*>for</b>", code)  # elements say it, where style is dropped
    assert html.unescape(re.sub(r"<[^>]*>", "", code)).split() == text.split()


def test_show_one_function_of_a_file(monkeypatch, tmp_path):
    (tmp_path / "two.c").write_text(
        "/* About the file. */\n#include <math.h>\n\n/* Half\n   of it. */\nstatic float half(float x) {\n"
        "    if (x) {\n        x /= 2;\n    }\n    return x;\n}\n\nfloat twice(float x) {\n    return half(4 * x);\n}\n"
    )
    monkeypatch.setattr(source, "ROOT", tmp_path)
    text = (tmp_path / "two.c").read_text()
    half, twice = text[text.index("/* Half") : text.index("\nfloat")], text[text.index("float twice") :]
    assert repr(show("two.c", "half")) == half and repr(show("two.c", "twice")) == twice
    assert repr(show("two.c", "twice", "half")) == f"{twice}\n{half}"
    for missing in ("thrice", "hal", "if"):
        with pytest.raises(ValueError, match=f"show: two.c, and what it includes, define no '{missing}'"):
            show("two.c", missing)


def test_show_a_kernel_whose_declaration_takes_two_lines(monkeypatch, tmp_path):
    kernel = 'extern "C" __global__ void __launch_bounds__(256, 3)\ngemv(const float *W, int n) {\n    W[n];\n}\n'
    other = "__device__ int other(int a) {\n    gemv(a);\n}\n"
    (tmp_path / "k.cu").write_text(f"#include <x.h>\nusing T = float;\n{kernel}\n{other}")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert repr(show("k.cu", "gemv")) == kernel and repr(show("k.cu", "other")) == other


PART = """\
void f(int n) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < n; i++) {
        sum += i;
    }

    // done
    g(sum);
}

void g(int sum) {
    for (;;) {
    }
}
"""


def test_show_a_part(monkeypatch, tmp_path):
    (tmp_path / "f.cu").write_text(PART)
    (tmp_path / "f.py").write_text("def f():\n    # 1\n    x = 1\n\n    return x\n\n\ndef g():\n    pass\n")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    loop = "for (int i = 0; i < n; i++) {\n    sum += i;\n}"
    assert repr(show("f.cu", begin="for (", end="// done")) == loop
    assert repr(show("f.cu", begin="int sum = 0", end="// done")) == "int sum = 0;\n#pragma unroll\n" + loop
    assert repr(show("f.cu", begin="// done")) == "// done\ng(sum);"  # to the function's end
    assert repr(show("f.cu", "g", begin="for (")) == "for (;;) {\n}"
    assert repr(show("f.py", begin="# 1", end="def g")) == "# 1\nx = 1\n\nreturn x"
    assert repr(show(roofline.attainable, begin="def", end="return")).startswith("def attainable(")


@pytest.mark.parametrize(
    "part, missing", [(("h(", None), "'h('"), (("g(sum", "f("), "'f(' behind it"), (("}", "}}"), "'}}' behind it")]
)
def test_show_a_part_that_is_not_there(part, missing, monkeypatch, tmp_path):
    (tmp_path / "f.cu").write_text(PART)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    begin, end = part
    with pytest.raises(ValueError, match=re.escape(f"show: f.cu has no line with {missing}") + "$"):
        show("f.cu", begin=begin, end=end)


def test_show_python():
    assert repr(show(roofline.tokens_per_second)).startswith("def tokens_per_second(bytes_read, bandwidth):\n")
    both = show(roofline.ModelConfig.parameters, roofline.attainable)
    assert "\ndef parameters(self):" in "\n" + repr(both) and "def attainable(" in repr(both)
    page = both._repr_html_()
    assert "ref/roofline.py" in page and str(ROOT) not in page


@pytest.mark.parametrize("path", ["../other.txt", "/etc/hostname", "lab/../../other.txt", "nowhere.c", "lab", "."])
def test_show_stays_in_the_courses_folder(path, monkeypatch, tmp_path):
    (tmp_path / "course" / "lab").mkdir(parents=True)
    (tmp_path / "other.txt").write_text("secret")
    monkeypatch.setattr(source, "ROOT", tmp_path / "course")
    with pytest.raises(FileNotFoundError, match=f"show: there is no file {re.escape(path)} in the course's folder"):
        show(path)


def test_show_does_not_follow_a_link_out_of_the_folder(monkeypatch, tmp_path):
    (tmp_path / "course").mkdir()
    (tmp_path / "other.txt").write_text("secret")
    (tmp_path / "course" / "inside.txt").symlink_to(tmp_path / "other.txt")
    monkeypatch.setattr(source, "ROOT", tmp_path / "course")
    with pytest.raises(FileNotFoundError):
        show("inside.txt")


# Widgets


@pytest.fixture
def drawn(monkeypatch):
    """What explore shows, instead of a page."""
    found = []

    def format_display_data(shown):
        found.append(shown)
        return {"text/plain": repr(shown)}, {}

    monkeypatch.setattr("IPython.core.formatters.format_display_data", format_display_data)
    return found


def test_explore_builds_the_right_controls(drawn):
    box = explore(
        lambda **values: values,
        whole=(1, 9, 3),
        part=(0.0, 1, 0.5),
        listed=[256, 1024, 4096],
        menu=["a", "b"],
        model_name={"seven": 7, "eight": 8},
        tick=False,
    )
    *controls, picture = box.children
    assert isinstance(picture, ipywidgets.Output)
    whole, part, listed, menu, model, tick = controls
    assert isinstance(whole, ipywidgets.IntSlider) and (whole.min, whole.max, whole.value) == (1, 9, 3)
    assert isinstance(part, ipywidgets.FloatSlider) and (part.min, part.max, part.value) == (0, 1, 0.5)
    assert part.step == pytest.approx(0.01)
    assert isinstance(listed, ipywidgets.SelectionSlider) and listed.options == (256, 1024, 4096)
    assert isinstance(menu, ipywidgets.Dropdown) and menu.options == ("a", "b")
    assert isinstance(model, ipywidgets.Dropdown) and model.value == 7
    assert isinstance(tick, ipywidgets.Checkbox) and tick.value is False
    assert [c.description for c in controls] == ["whole", "part", "listed", "menu", "model name", "tick"]
    assert drawn == [dict(whole=3, part=0.5, listed=256, menu="a", model_name=7, tick=False)]


def test_explore_redraws_when_a_value_changes_and_only_then(drawn):
    box = explore(lambda n, model: (n, model), n=(1, 9, 3), model={"seven": 7, "eight": 8})
    n, model, picture = box.children
    n.value = 5
    model.value = 8
    model.value = 8
    n.description = "another"
    assert drawn == [(3, 7), (5, 7), (5, 8)]
    shown = {"output_type": "display_data", "data": {"text/plain": "(5, 8)"}, "metadata": {}}
    assert picture.outputs == (shown,) and picture.msg_id == ""  # nothing is captured


def test_menus_start_at_the_functions_default(drawn):
    def draw(context=1024, model=8, menu="c"):
        return context, model, menu

    explore(draw, context=[256, 1024], model={"seven": 7, "eight": 8}, menu=["a", "b"])
    assert drawn == [(1024, 8, "a")]


def test_an_interrupted_drawing_is_passed_over(drawn):
    def draw(n):
        if n == 4:
            raise KeyboardInterrupt
        return n

    box = explore(draw, n=(1, 9, 3))
    for n in (4, 5):
        box.children[0].value = n
    assert drawn == [3, 5]


# Exercises


def ask(*blocks):
    """Run blocks of a check, one after another; return the exercise."""
    exercise = Exercise("Exercise 1: halves")
    for block in blocks:
        with exercise:
            block(exercise)
    return exercise.report("right for 3 cases")


def no_error(exercise):
    exercise.require(True, "this does not show")


def wrong(exercise):
    exercise.require(1 > 2, "expected 3, got 4")
    raise AssertionError("the check went on")


def stub(exercise):
    raise NotImplementedError("not done yet")


def stub_in_c(exercise):
    compile_c('#error "not done yet"', openmp=False)


def bad_c(exercise):
    compile_c("int f(void) {\n    return nowhere;\n}", openmp=False)


def raises(exercise):
    [][3]  # noqa: B018


def says_not_done(exercise):
    raise ValueError("this is not done yet, says another error")


@pytest.mark.parametrize(
    ("block", "passed", "said"),
    [
        (no_error, True, "Exercise 1: halves: passed: right for 3 cases\n"),
        (wrong, False, "Exercise 1: halves: not yet: expected 3, got 4\n"),
        (stub, False, "Exercise 1: halves: not done yet\n"),
        (stub_in_c, False, "Exercise 1: halves: not done yet\n"),
        (raises, False, "Exercise 1: halves: not yet: your code raised IndexError: list index out of range"),
        (says_not_done, False, "Exercise 1: halves: not yet: your code raised ValueError: this is not done yet"),
        (bad_c, False, "Exercise 1: halves: not yet: source.c does not compile:\n"),
    ],
)
def test_verdicts(capsys, block, passed, said):
    exercise = ask(block)
    out = capsys.readouterr().out
    assert exercise.passed is passed and out.startswith(said) and exercise.message in out


def test_the_learners_line_is_shown(capsys):
    ask(raises)
    assert "at `[][3]" in capsys.readouterr().out
    ask(bad_c)
    out = capsys.readouterr().out
    assert "source.c:2:" in out and "return nowhere;" in out and str(ROOT) not in out


def test_a_c_stubs_message_and_a_wrong_one_are_told_apart():
    with pytest.raises(CompileError):
        stub_in_c(None)
    assert ask(stub_in_c).message == "not done yet" and ask(bad_c).message != "not done yet"


@pytest.mark.parametrize("bad", [wrong, stub, raises])
def test_of_several_blocks_every_one_must_hold(bad):
    for blocks in ((no_error, bad), (bad, no_error), (no_error, bad, no_error)):
        exercise = ask(*blocks)
        assert not exercise.passed and not exercise.message.startswith("passed")
    assert ask(no_error, no_error).passed


def test_an_interrupt_stays_an_interrupt():
    exercise = Exercise("Exercise 1")
    with pytest.raises(KeyboardInterrupt), exercise:
        raise KeyboardInterrupt
    assert not exercise.passed


def test_code_that_ends_the_program_does_not_end_the_check():
    exercise = Exercise("Exercise 1")
    with exercise:
        sys.exit()
    assert not exercise.passed and exercise.message.startswith("not yet: your code ended the program")


def test_what_follows_a_failure_does_not_run():
    ran = []
    exercise = Exercise("Exercise 1")
    with exercise:
        exercise.require(ran == [1], "first")
        ran.append(2)
    assert ran == [] and exercise.message == "not yet: first"


# A warp's addresses as a picture

LANE = np.arange(32)


def panels(requests, size=4):
    """What the picture says: the titles, and for each panel how many sectors are filled, and the texts in it."""
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    picture = plots.warp_addresses(requests, size)
    for axis in picture.axes:
        boxes = [to_hex(p.get_facecolor()).upper() for p in axis.patches if isinstance(p, Rectangle)]
        yield axis.get_title("left"), boxes.count("#FFE7B3"), boxes.count(plots.SKY), [t.get_text() for t in axis.texts]


@pytest.mark.parametrize(
    ("addresses", "size", "sectors", "lines", "title"),
    [
        (4 * LANE, 4, 4, 1, "4 sectors, 128 bytes, of which 128 are used (100 %)"),
        (4 * LANE + 12, 4, 5, 2, "5 sectors, 160 bytes, of which 128 are used (80 %)"),
        (16384 * LANE, 4, 32, 32, "32 sectors, 1,024 bytes, of which 128 are used (12.5 %)"),
        (2 * LANE, 2, 2, 1, "2 sectors, 64 bytes, of which 64 are used (100 %)"),
        (16 * LANE, 16, 16, 4, "16 sectors, 512 bytes, of which 512 are used (100 %)"),
        (128 - 4 * LANE, 4, 5, 2, "5 sectors, 160 bytes, of which 128 are used (80 %)"),
    ],
)
def test_the_picture_of_a_warp_fills_the_sectors_it_counts(addresses, size, sectors, lines, title):
    ((said, filled, lanes, texts),) = panels({"load": addresses}, size)
    assert said == f"load: {title}" and filled == sectors and lanes == 32
    assert sorted(texts, key=int) == [str(lane) for lane in LANE]
    (axis,) = plots.warp_addresses({"load": addresses}, size).axes
    assert len(axis.get_yticks()) == lines


def test_lanes_that_share_an_address_or_take_no_part():
    addresses = [None if lane >= 8 else 4 * lane for lane in range(32)]
    same, few, none = panels({"one address": 0 * LANE + 40, "8 lanes": addresses, "nobody": [None] * 32})
    assert same == ("one address: 1 sector, 32 bytes, of which 4 are used (12.5 %)", 1, 1, ["32 lanes"])
    assert few[0] == "8 lanes: 1 sector, 32 bytes, of which 32 are used (100 %)" and few[1:3] == (1, 8)
    assert none == ("nobody: 0 sectors, 0 bytes", 0, 0, [])
