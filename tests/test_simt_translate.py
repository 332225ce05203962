"""Between PTX and NumPy: integers that are kept lazily, basic blocks, and the parser."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simt.arithmetic import lazy
from simt.arithmetic.lazy import Known, Lazy, as_signed
from simt.ptx import blocks, reader
from simt.ptx.reader import Imm, Mem, Not, Pair, Reg, Sym, Vec

# Integers. A register is an int or a Lazy; truth is Python's int, lane by lane.

WIDTHS = (8, 16, 32, 64)
SHAPES = ((1, 1, 4), (2, 1, 1), (1, 3, 1), (2, 3, 4), (2, 1, 4))
COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def numbers(width):
    """Of all sizes, and those near the edges of the signed and unsigned ranges, 0 and the powers of two."""
    top = 1 << width
    edges = st.sampled_from([0, top >> 1, top >> 2, 1, 4, 32]).flatmap(lambda e: st.integers(e - 9, e + 9))
    return st.one_of(edges, st.integers(0, 200), st.integers(0, top - 1)).map(lambda x: x % top)


@st.composite
def registers(draw, width, ints=True):
    """An int, or array + offset; arrays of one value, of neighbouring values, of any values."""
    if ints and draw(st.booleans()):
        return draw(numbers(width))
    shape = draw(st.sampled_from(SHAPES))
    size = int(np.prod(shape))
    kind = draw(st.sampled_from(["even", "any", "small"]))
    if kind == "even":
        base, step = draw(numbers(width)), draw(st.sampled_from([0, 1, 2, 4, 32, -1]))
        values = [(base + n * step) % (1 << width) for n in range(size)]
    else:
        values = draw(st.lists(numbers(width) if kind == "any" else st.integers(0, 60), min_size=size, max_size=size))
    array = np.array(values, np.uint64).astype(lazy.UNSIGNED[width]).reshape(shape)
    return Lazy(Known(array), draw(st.one_of(st.just(0), numbers(width))))


def lanes(x, shape=None):
    """The values of a register, one Python int for each lane."""
    if isinstance(x, (int, bool, np.bool_)):
        return [int(x)] * int(np.prod(shape or (2, 3, 4)))
    if isinstance(x, Lazy):
        assert 0 <= x.offset < 1 << x.known.width, f"an offset of {x.offset}"
        plain = x.known.array.astype(object) + x.offset
        x = plain % (1 << x.known.width)
    return [int(v) for v in np.broadcast_to(x, shape or (2, 3, 4)).reshape(-1)]


def check(found, truth, *given, width):
    """`found` is a register of `width` bits that holds truth(...) modulo 2**width in each lane."""
    assert isinstance(found, (int, Lazy)) and not isinstance(found, bool)
    if isinstance(found, int):
        assert 0 <= found < 1 << width
    else:
        assert found.known.width == width
        assert np.array_equal(lanes(found.array()), lanes(found))
    assert lanes(found) == [truth(*row) % (1 << width) for row in zip(*map(lanes, given))]


def toward_zero(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("width", WIDTHS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_arithmetic_wraps_around(width, data):
    a, b, c = (data.draw(registers(width)) for _ in "abc")
    for _ in range(2):  # the second time from what the arrays remember
        check(lazy.add(a, b, width), lambda x, y: x + y, a, b, width=width)
        check(lazy.subtract(a, b, width), lambda x, y: x - y, a, b, width=width)
        check(lazy.subtract(a, a, width), lambda x, y: x - y, a, a, width=width)
        check(lazy.multiply(a, b, width), lambda x, y: x * y, a, b, width=width)
        check(lazy.multiply_add(a, b, c, width), lambda x, y, z: x * y + z, a, b, c, width=width)
        check(lazy.bit_and(a, b, width), lambda x, y: x & y, a, b, width=width)
        check(lazy.bit_or(a, b, width), lambda x, y: x | y, a, b, width=width)
        check(lazy.bit_xor(a, b, width), lambda x, y: x ^ y, a, b, width=width)
        check(lazy.bit_not(a, width), lambda x: ~x, a, width=width)


@pytest.mark.parametrize("width", (16, 32, 64))
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_shifts(width, data):
    a = data.draw(registers(width))
    count = data.draw(st.one_of(st.integers(0, width + 3), st.sampled_from([255, 1 << 31]), registers(32, ints=False)))
    check(lazy.shift_left(a, count, width), lambda x, n: x << min(n, width), a, count, width=width)
    check(lazy.shift_right(a, count, width, False), lambda x, n: x >> min(n, width), a, count, width=width)
    signed = lazy.shift_right(a, count, width, True)
    check(signed, lambda x, n: as_signed(x, width) >> min(n, width), a, count, width=width)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from(WIDTHS), st.sampled_from(WIDTHS), st.booleans())
def test_widening_and_narrowing(data, width, to, signed):
    a = data.draw(registers(width))
    found = lazy.convert(a, width, to, signed)
    check(found, lambda x: as_signed(x, width) if signed else x, a, width=to)
    if width < 64:
        b = data.draw(registers(width))
        wide = lazy.multiply_wide(a, b, width, signed)
        read = (lambda x: as_signed(x, width)) if signed else (lambda x: x)
        check(wide, lambda x, y: read(x) * read(y), a, b, width=2 * width)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("width", (16, 32, 64))
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_quotients(width, signed, data):
    a = data.draw(registers(width))
    b = data.draw(st.one_of(registers(width), st.sampled_from([1, 2, 3, 4, 32, 100])))
    read = (lambda x: as_signed(x, width)) if signed else (lambda x: x)
    asked = []

    def general(operation):
        def function(x, y):
            asked.append(operation)
            rows = [(read(int(p)), read(int(q))) for p, q in np.broadcast(x, y)]
            values = [0 if q == 0 else operation(p, q) for p, q in rows]
            shape = np.broadcast_shapes(x.shape, y.shape)
            return np.array([v % (1 << width) for v in values], np.uint64).astype(f"u{width // 8}").reshape(shape)

        return function

    divide, remain = toward_zero, lambda p, q: p - q * toward_zero(p, q)
    for function, operation in ((lazy.divide, divide), (lazy.remainder, remain)):
        found = function(a, b, width, signed, general(operation))
        check(found, lambda x, y, o=operation: o(read(x), read(y)) if y else 0, a, b, width=width)
        for sum_of in (lazy.add(found, 7, width), lazy.multiply(found, 3, width)):
            assert lanes(sum_of) == lanes(sum_of if isinstance(sum_of, int) else sum_of.array())


@pytest.mark.parametrize("signed", [False, True])
@settings(deadline=None, max_examples=100)
@given(data=st.data(), width=st.sampled_from((16, 32, 64)))
def test_comparisons(data, width, signed):
    a, b = data.draw(registers(width)), data.draw(registers(width))
    read = (lambda x: as_signed(x, width)) if signed else (lambda x: x)
    for name, operation in COMPARISONS.items():
        for x, y in ((a, b), (a, a), (a, lazy.add(a, 1, width))):
            found = lazy.compare(name, x, y, width, signed)
            assert isinstance(found, bool) or found.dtype == bool
            assert lanes(found) == [operation(read(p), read(q)) for p, q in zip(lanes(x), lanes(y))]


@settings(deadline=None, max_examples=100)
@given(data=st.data(), width=st.sampled_from(WIDTHS), signed=st.booleans())
def test_ranges(data, width, signed):
    a = data.draw(registers(width, ints=False))
    read = (lambda x: as_signed(x, width)) if signed else (lambda x: x)
    values, known = [read(v) for v in lanes(a)], [read(v) for v in lanes(Lazy(a.known))]
    found = a.range(signed)
    if found is not None:
        low, high, offset = found
        assert (low, high) == (min(values), max(values)) and (offset - a.offset) % (1 << width) == 0
        assert [v + offset for v in known] == values  # counted so, no element wraps
    assert a.settled().range(signed)[:2] == (min(values), max(values))


def test_a_moving_pointer_touches_no_array():
    """What makes loops cheap: a sum with a constant keeps the array, and the array remembers its products."""
    a = Lazy(Known(np.arange(32, dtype=np.uint32).reshape(1, 1, 32)))
    one, two = lazy.add(a, 128, 32), lazy.add(lazy.add(a, 64, 32), 64, 32)
    assert one.known is two.known is a.known and one.offset == two.offset == 128
    assert lazy.multiply(one, 4, 32).known is lazy.multiply(a, 4, 32).known
    assert lazy.widen(one, 32, 64, True).known is lazy.widen(a, 32, 64, True).known
    assert lazy.shift_right(one, 5, 32, False).known is lazy.shift_right(a, 5, 32, False).known
    assert lazy.compare("lt", one, 160, 32, True) is True and lazy.compare("ge", one, 160, 32, True) is False


# The parser.

TEXT = """
//
// a comment; with a brace {
//
.version 8.4
.target sm_90a
.address_size 64
.file 1 "/home/someone/kernel.cu"
.file 2 "/usr/include/cuda_fp16.hpp"
.extern .shared .align 16 .b8 dynamic[];
.global .align 4 .u32 table[3] = {1, 0x10, 4294967295};
.const .align 8 .f64 half = 0d3FE0000000000000;
.global .align 1 .b8 $str[3] = {97, 98};
.global .align 8 .u64 names[2] = {generic($str), generic($str)+1};
.visible .func (.param .b32 out) helper(.param .b32 in, .param .align 8 .b8 pair[16]) ;
.visible .entry k(
  .param .u64 .ptr .global .align 4 k_param_0,
  .param .align 4 .b8 k_param_1[12],
  .param .f32 k_param_2
)
.maxntid 128, 1, 1
.minnctapersm 2
{
  .reg .pred %p<3>;
  .reg .b32 %r<5>;
  .reg .f32 %f1, %f2;
  .shared .align 4 .b8 tile[2][8];
  .loc 1 7 3
  mov.u32 %r1, %tid.x;
  @!%p1 ld.global.v2.u32 {%r2, _}, [%rd1+-8];   /* a comment */
  .loc 2 99 1, function_name $L__info, inlined_at 1 9 5
  setp.lt.and.f32 %p1|%p2, %f1, 0f3F800000, !%p1;
$L__BB0_1:
  .loc 2 50 1
  { .reg .b32 %r1; .reg .pred q; mov.u32 %r1, WARP_SZ; @q bra HERE; st.shared.u32 [tile+4], %r1; HERE: }
  { .reg .b32 %r1; mov.b32 %r1, -5; HERE: @%p1 bra HERE; }
  call.uni (retval0), helper, (param0, param1);
  @%p2 bra $L__BB0_1;
  .pragma "nounroll";
  fma.rn.f64 %fd1, %fd2, 0d3FF0000000000000, %fd1;
  ret;
}
"""


def test_variables_and_functions():
    module = reader.parse(TEXT)
    assert module.target == "sm_90a" and module.files == {1: "/home/someone/kernel.cu", 2: "/usr/include/cuda_fp16.hpp"}
    v = module.variables
    assert v["dynamic"].external and v["dynamic"].size == 0 and v["dynamic"].align == 16
    assert v["table"].data == (1).to_bytes(4, "little") + (16).to_bytes(4, "little") + b"\xff" * 4
    assert v["half"].space == "const" and np.frombuffer(v["half"].data, np.float64)[0] == 0.5
    assert v["$str"].data == b"ab" and v["$str"].size == 3
    assert v["names"].size == 16 and v["names"].pointers == ((0, "$str", 0), (8, "$str", 1))
    helper, k = module.functions["helper"], module.functions["k"]
    assert not helper.entry and helper.instructions == [] and [p.size for p in helper.parameters] == [4, 16]
    assert [p.name for p in helper.returns] == ["out"]
    assert [(p.name, p.type, p.size, p.align) for p in k.parameters] == [
        ("k_param_0", "u64", 8, 8), ("k_param_1", "b8", 12, 4), ("k_param_2", "f32", 4, 4)
    ]  # fmt: skip
    assert k.directives == {"maxntid": (128, 1, 1), "minnctapersm": (2,)}
    assert k.variables["tile"].size == 16 and k.variables["tile"].space == "shared"
    assert k.registers["%r4"] == "b32" and k.registers["%f2"] == "f32" and k.registers["%p0"] == "pred"


def test_instructions_with_guards_vectors_and_lines():
    code = reader.parse(TEXT).functions["k"].instructions
    tid, load, setp = code[:3]
    assert tid.operands == (Reg("%r1"), Reg("%tid.x")) and tid.line == 7 and tid.guard is None
    assert load.guard == ("%p1", False) and load.parts == ("ld", "global", "v2", "u32")
    assert load.operands == (Vec((Reg("%r2"), Reg("_"))), Mem(Reg("%rd1"), -8))
    assert setp.operands == (Pair(Reg("%p1"), Reg("%p2")), Reg("%f1"), Imm(0x3F800000, "f32"), Not(Reg("%p1")))
    assert setp.line == 9, "code inlined from a header belongs to the line that it was inlined at"
    assert str(load) == "@!%p1 ld.global.v2.u32 {%r2, _}, [%rd1-8]"
    assert str(setp) == "setp.lt.and.f32 %p1|%p2, %f1, 0f3F800000, !%p1"
    assert code[-2].operands[2] == Imm(0x3FF0000000000000, "f64")


def test_names_in_braces_belong_to_them():
    function = reader.parse(TEXT).functions["k"]
    code = function.instructions
    outer, first, second = code[0], *[i for i in code if i.opcode.startswith("mov") and i is not code[0]]
    names = {i.operands[0].name for i in (outer, first, second)}
    assert len(names) == 3 and all(function.registers[n] == "b32" for n in names)
    assert first.operands[1] in (Sym("WARP_SZ"), Reg("WARP_SZ")) and second.operands[1] == Imm(-5)
    store = next(i for i in code if i.opcode == "st.shared.u32")
    assert store.operands == (Mem(Sym("tile"), 4), first.operands[0])
    jumps = [i for i in code if i.opcode == "bra"]
    assert [function.labels[j.operands[0].name] for j in jumps] == [
        code.index(store) + 1, code.index(second) + 1, code.index(first)
    ]  # fmt: skip
    assert jumps[0].guard[0] in function.registers


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("-7", Imm(-7)),
        ("0x1F", Imm(31)),
        ("7U", Imm(7)),
        ("0f80000000", Imm(1 << 31, "f32")),
        ("0F3f800000", Imm(0x3F800000, "f32")),
        ("[%rd1]", Mem(Reg("%rd1"), 0)),
        ("[ %rd1 + 16 ]", Mem(Reg("%rd1"), 16)),
        ("[name+-4]", Mem(Sym("name"), -4)),
        ("[1024]", Mem(None, 1024)),
        ("{%f1, {%f2}}", Vec((Reg("%f1"), Vec((Reg("%f2"),))))),
        ("%r1|%p1", Pair(Reg("%r1"), Reg("%p1"))),
        ("(a, b)", (Sym("a"), Sym("b"))),
    ],
)
def test_operands(text, wanted):
    assert reader.operand(text, reader.Scopes({})) == wanted


# Basic blocks, what lives on between them, and loops that wait.


def analysed(body, head=".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;", before=""):
    module = reader.parse(f".target sm_90\n{before}\n.visible .entry k() {{ {head}\n{body}\n}}")
    return blocks.analyse(module.functions["k"], module)


def test_blocks_of_a_loop_and_what_lives_on():
    f = analysed("""
      mov.u32 %r1, 0; mov.u32 %r2, %tid.x; mov.u32 %r3, 7; mov.u64 %rd1, 0;
    LOOP:
      add.s32 %r1, %r1, 1;
      setp.lt.s32 %p1, %r1, %r2;
      @%p1 bra LOOP;
      bra.uni DONE;
      add.s32 %r4, %r3, 1;
    DONE:
      st.global.u32 [%rd1], %r1;
      ret;""")
    assert [(b.start, b.end) for b in f.blocks] == [(0, 4), (4, 7), (7, 8), (8, 9), (9, 11)]
    assert [b.targets for b in f.blocks] == [[], [1], [4], [], []]
    assert [b.falls for b in f.blocks] == [True, True, False, True, False]
    assert f.blocks[0].live_out == {"%r1", "%r2", "%rd1"} | ({"%r3"} & f.blocks[0].live_out)
    assert f.blocks[1].live_out >= {"%r1", "%r2", "%rd1"} and f.blocks[2].live_out == {"%r1", "%rd1"}
    assert f.blocks[4].live_out == set() and f.blocks[4].reads == {"%r1", "%rd1"}
    assert not any(b.spins for b in f.blocks)


def test_a_guarded_result_keeps_the_old_value_alive():
    f = analysed(
        "mov.u32 %r1, 1; mov.u64 %rd1, 0; setp.eq.u32 %p1, %r1, 0; bra.uni NEXT; "
        "NEXT: @%p1 mov.u32 %r1, 2; st.global.u32 [%rd1], %r1; ret;"
    )
    assert f.blocks[1].reads == {"%p1", "%r1", "%rd1"}
    assert "%r1" in f.blocks[0].live_out and f.unset is None


def test_what_may_be_unset_lives_on_with_its_mark():
    f = analysed("""
      mov.u32 %r1, %tid.x; mov.u64 %rd1, 0; setp.lt.u32 %p1, %r1, 7;
      @%p1 bra NEXT;
      mov.u32 %r2, 1;
    NEXT:
      add.s32 %r3, %r2, %r1; mov.u32 %r4, %r1;
      st.global.u32 [%rd1], %r3;
      ret;""")
    assert f.unset.marked == {"%r2", "%r3"} and f.unset.before == {5: {"%r2"}, 7: {"%r3"}}
    assert f.blocks[0].live_out == {"%r1", "%r2", "%rd1", "%r2 mark"} and f.blocks[1].writes == {"%r2", "%r2 mark"}


def test_blocks_end_where_threads_meet():
    f = analysed("""
      mov.u32 %r1, 1; bar.sync 0; mov.u32 %r2, 2;
      shfl.sync.bfly.b32 %r3|%p1, %r1, 1, 31, -1;
      shfl.sync.bfly.b32 %r3|%p1, %r3, 2, 31, -1;
      shfl.sync.bfly.b32 %r3|%p1, %r3, 4, 31, 255;
      vote.sync.any.pred %p2, %p1, %r3;
      bar.red.popc.u32 %r4, 0, %p2;
      st.global.u32 [%rd1], %r4; ret;""")
    assert [b.start for b in f.blocks] == [0, 2, 3, 5, 6, 8]  # two shuffles of one mask stay together
    assert all(b.joint for b in f.blocks[:-1]) and not f.blocks[-1].joint
    assert f.blocks[4].writes == {"%p2", "%r4"}


SPINS = {
    "volatile": "LOOP: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.s32 %p1, %r1, 0; @%p1 bra LOOP; ret;",
    "acquire": "LOOP: ld.acquire.gpu.global.u32 %r1, [%rd1]; setp.eq.s32 %p1, %r1, 0; @%p1 bra LOOP; ret;",
    "swap": "LOOP: atom.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.s32 %p1, %r1, 0; @%p1 bra LOOP; ret;",
    "computed": "LOOP: ld.volatile.u32 %r1, [%rd1]; and.b32 %r2, %r1, 3; vote.sync.any.pred %p2, %p3, -1; "
    "setp.lt.s32 %p1, %r2, 2; @%p1 bra LOOP; ret;",
    "exit in the middle": "LOOP: ld.relaxed.gpu.u32 %r1, [%rd1]; setp.eq.s32 %p1, %r1, 5; @%p1 bra OUT; "
    "add.s32 %r3, %r3, 1; bra.uni LOOP; OUT: ret;",
    "told": "LOOP: ld.volatile.global.u32 %r1, [%rd1]; st.shared.u32 [%r5], %r1; bar.sync 0; ld.shared.u32 %r2, [%r5]; "
    "setp.eq.s32 %p1, %r2, 0; @%p1 bra LOOP; ret;",
}
NO_SPINS = {
    "plain load": SPINS["volatile"].replace(".volatile", ""),
    "result unused": "LOOP: ld.volatile.global.u32 %r1, [%rd1]; add.s32 %r2, %r2, 1; "
    "setp.lt.s32 %p1, %r2, 9; @%p1 bra LOOP; ret;",
    "no loop": "ld.volatile.global.u32 %r1, [%rd1]; "
    "setp.eq.s32 %p1, %r1, 0; @%p1 bra OUT; st.global.u32 [%rd2], 1; OUT: ret;",
    "after the load": "ld.volatile.global.u32 %r1, [%rd1]; "
    "LOOP: add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, %r1; @%p1 bra LOOP; ret;",
}


@pytest.mark.parametrize("name", SPINS)
def test_loops_that_wait_are_seen(name):
    assert any(b.spins for b in analysed(SPINS[name]).blocks)


@pytest.mark.parametrize("name", NO_SPINS)
def test_other_loops_do_not_wait(name):
    assert not any(b.spins for b in analysed(NO_SPINS[name]).blocks)


def test_calls_are_put_in_place_each_with_names_of_its_own():
    before = """.func (.param .b32 out) twice(.param .b32 in) {
      .reg .b32 %r<3>; .reg .pred %p<2>;
      ld.param.u32 %r1, [in]; setp.gt.s32 %p1, %r1, 9; @%p1 bra BIG;
      add.s32 %r1, %r1, %r1;
    BIG:
      st.param.b32 [out], %r1; ret; }"""
    call = "{ .param .b32 a; st.param.b32 [a], %r1; .param .b32 b; call.uni (b), twice, (a); ld.param.b32 %r1, [b]; }"
    f = analysed(f"mov.u32 %r1, %tid.x; {call} {call} st.global.u32 [%rd1], %r1; ret;", before=before)
    code = f.function.instructions
    assert not any(i.parts[0] == "call" for i in code) and sum(i.parts[0] == "add" for i in code) == 2
    assert len([label for label in f.function.labels if "BIG" in label]) == 2
    added = [i.operands[0].name for i in code if i.parts[0] == "add"]
    assert len(set(added)) == 2 and "%r1" not in added
    assert [i.parts[0] for i in code].count("ret") == 1
