"""Which shared accesses ptxas joins: predicted from PTX, and where Triton's wheel has ptxas, read from machine code."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from simt.ptx import reader
from simt.ptx.wide_accesses import access_bytes, in_shared, joined, laid_out

TOP = ".version 8.0\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 dynamic[];\n"
HEAD = """\
.visible .entry k(.param .u64 k_out, .param .u32 k_n)
{
.reg .pred %p<9>;
.reg .b16 %h<9>;
.reg .b32 %r<40>;
.reg .f32 %f<40>;
.reg .b64 %rd<9>;
.reg .f64 %fd<9>;
SHARED
mov.u32 %r1, %tid.x;
ld.param.u32 %r2, [k_n];
ld.param.u64 %rd1, [k_out];
cvta.to.global.u64 %rd2, %rd1;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd4, %rd2, %rd3;
mov.u32 %r3, s;
BODY
ret;
}
"""


def kernel(body, shared=".shared .align 4 .b8 s[8192];"):
    """`body` in a kernel that knows %r1 = tid.x, %r2 = n, %r3 = s, %rd4 = out + tid.x."""
    return TOP + HEAD.replace("SHARED", shared).replace("BODY", body)


def loads(base, offsets, kind="f32", first=1):
    """Loads to %f1, %f2, ... and a use of each."""
    lines = [f"ld.shared.{kind} %f{first + n}, [{base}+{o}];" for n, o in enumerate(offsets)]
    return "\n".join(lines)


def keep(count, first=1):
    """Store the loaded values, so that they are used."""
    return "\n".join(f"st.global.f32 [%rd4+{4 * n}], %f{first + n};" for n in range(count))


def stores(base, offsets, kind="f32"):
    return "ld.global.f32 %f1, [%rd4];\n" + "\n".join(f"st.shared.{kind} [{base}+{o}], %f1;" for o in offsets)


def by_tid(shift, to="%r5"):
    """%r5 = s + (tid.x << shift)"""
    return f"shl.b32 %r4, %r1, {shift};\nadd.s32 {to}, %r3, %r4;\n"


READ_BACK = "bar.sync 0;\nld.shared.f32 %f30, [s+400];\nst.global.f32 [%rd4], %f30;\n"
FLOAT4 = "ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r5];\n"

# name: (PTX, {(load or store, bits): how many in machine code})
CASES = {
    "four words": (by_tid(4) + loads("%r5", [0, 4, 8, 12]) + keep(4), {("ld", 128): 1}),
    "three words, not the first": (by_tid(4) + loads("%r5", [4, 8, 12]) + keep(3), {("ld", 128): 1}),
    "a pair": (by_tid(3) + loads("%r5", [0, 4]) + keep(2), {("ld", 64): 1}),
    "a pair that no 8 bytes hold": (by_tid(4) + loads("%r5", [4, 8]) + keep(2), {("ld", 32): 2}),
    "two words apart": (by_tid(4) + loads("%r5", [0, 8]) + keep(2), {("ld", 32): 2}),
    "neighbours of unknown alignment": (by_tid(2) + loads("%r5", [0, 4, 8, 12]) + keep(4), {("ld", 32): 4}),
    "four words, aligned to 8": (by_tid(3) + loads("%r5", [0, 4, 8, 12]) + keep(4), {("ld", 64): 2}),
    "five words": (by_tid(4) + loads("%r5", [0, 4, 8, 12, 16]) + keep(5), {("ld", 128): 1, ("ld", 32): 1}),
    "any order": (by_tid(5) + loads("%r5", [20, 0, 16, 12, 24, 28, 4, 8]) + keep(8), {("ld", 128): 2}),
    "constant addresses": (loads("s", [16, 20, 24]) + keep(3), {("ld", 128): 1}),
    "doubles": (
        by_tid(4) + "ld.shared.f64 %fd1, [%r5];\nld.shared.f64 %fd2, [%r5+8];\nadd.f64 %fd3, %fd1, %fd2;\n"
        "st.global.f64 [%rd2], %fd3;",
        {("ld", 128): 1},
    ),
    "bytes": (
        by_tid(4) + "".join(f"ld.shared.u8 %r{6 + n}, [%r5+{n}];\nst.global.u32 [%rd4+{4 * n}], %r{6 + n};\n"
                            for n in range(4)),
        {("ld", 8): 4},
    ),
    "volatile": (by_tid(4) + loads("%r5", range(0, 16, 4)).replace("ld.", "ld.volatile.") + keep(4), {("ld", 32): 4}),
    "a float4 of which two are used": (by_tid(4) + FLOAT4 + keep(2), {("ld", 64): 1}),
    "a float4 of which three are used": (by_tid(4) + FLOAT4 + keep(3), {("ld", 128): 1}),
    "two float2": (
        by_tid(4) + "ld.shared.v2.f32 {%f1, %f2}, [%r5];\nld.shared.v2.f32 {%f3, %f4}, [%r5+8];\n" + keep(4),
        {("ld", 128): 1},
    ),
    "across a barrier": (
        by_tid(4) + loads("%r5", [0, 4]) + "\nbar.sync 0;\n" + loads("%r5", [8, 12], first=3) + keep(4),
        {("ld", 64): 2},
    ),
    "across a store to global memory": (
        by_tid(4) + loads("%r5", [0, 4]) + keep(2) + loads("%r5", [8, 12], first=3) + keep(2, 3),
        {("ld", 128): 1},
    ),
    "across a store to shared memory": (
        by_tid(4) + loads("%r5", [0, 4]) + "\nst.shared.f32 [%r3+4000], %f1;\n" + loads("%r5", [8, 12], first=3)
        + keep(4),
        {("ld", 64): 2, ("st", 32): 1},
    ),
    "across a division": (
        by_tid(4) + loads("%r5", [0, 4]) + "\ndiv.rn.f32 %f2, %f1, %f2;\n" + loads("%r5", [8, 12], first=3) + keep(4),
        {("ld", 64): 2},
    ),
    "and for alignment": (
        "and.b32 %r4, %r2, -16;\nadd.s32 %r5, %r3, %r4;\n" + loads("%r5", [0, 4, 8]) + keep(3), {("ld", 128): 1},
    ),
    "multiplied by 24": (
        "mul.lo.s32 %r4, %r2, 24;\nadd.s32 %r5, %r3, %r4;\n" + loads("%r5", [0, 4, 8, 12]) + keep(4), {("ld", 64): 2},
    ),
    "mad": ("mad.lo.s32 %r5, %r2, 48, %r3;\n" + loads("%r5", [0, 4, 8, 12]) + keep(4), {("ld", 128): 1}),
    "a pointer that moves by 16": (
        by_tid(4) + "mov.u32 %r6, 0;\nmov.f32 %f9, 0f00000000;\nLOOP:\n" + loads("%r5", [0, 4, 8, 12])
        + "\nadd.f32 %f9, %f9, %f1;\nmul.f32 %f9, %f9, %f2;\nadd.f32 %f9, %f9, %f3;\nmul.f32 %f9, %f9, %f4;\n"
        "add.s32 %r5, %r5, 16;\nadd.s32 %r6, %r6, 1;\nsetp.lt.s32 %p1, %r6, %r2;\n@%p1 bra LOOP;\n"
        "st.global.f32 [%rd4], %f9;",
        {("ld", 128): 1},
    ),
    "a pointer that moves by what is not known": (
        by_tid(4) + "mov.u32 %r6, 0;\nmov.f32 %f9, 0f00000000;\nLOOP:\n" + loads("%r5", [0, 4])
        + "\nadd.f32 %f9, %f9, %f1;\nmul.f32 %f9, %f9, %f2;\nadd.s32 %r5, %r5, %r2;\nadd.s32 %r6, %r6, 1;\n"
        "setp.lt.s32 %p1, %r6, %r2;\n@%p1 bra LOOP;\nst.global.f32 [%rd4], %f9;",
        {("ld", 32): 2},
    ),
    "four stores": (by_tid(4) + stores("%r5", [0, 4, 8, 12]) + READ_BACK, {("st", 128): 1, ("ld", 32): 1}),
    "three stores": (by_tid(4) + stores("%r5", [0, 4, 8]) + READ_BACK, {("st", 64): 1, ("st", 32): 1, ("ld", 32): 1}),
    "four stores of 2 bytes": (
        by_tid(3) + "mov.b16 %h1, 7;\n" + "".join(f"st.shared.b16 [%r5+{o}], %h1;\n" for o in (0, 2, 4, 6)) + READ_BACK,
        {("st", 64): 1, ("ld", 32): 1},
    ),
    "stores with a load between": (
        by_tid(4) + stores("%r5", [0, 4]) + "\nld.shared.f32 %f2, [s+4000];\n" + stores("%r5", [8, 12]) + READ_BACK
        + "st.global.f32 [%rd4+4], %f2;\n",
        {("st", 64): 2, ("ld", 32): 2},
    ),
    "a register that changes between": (
        by_tid(5) + loads("%r5", [0, 4]) + "\nadd.s32 %r5, %r5, 16;\n" + loads("%r5", [8, 12], first=3) + keep(4),
        {("ld", 64): 2},
    ),
    "a float4 at an address that only itself shows to be aligned": (
        "add.s32 %r5, %r3, %r2;\n" + FLOAT4 + keep(2), {("ld", 64): 1},
    ),
    "stores to two arrays in turn": (
        by_tid(4) + "add.s32 %r7, %r5, %r2;\n" + stores("%r5", [0]) + stores("%r7", [0]) + stores("%r5", [4])
        + stores("%r7", [4]) + READ_BACK,
        {("st", 32): 4, ("ld", 32): 1},
    ),
}  # fmt: skip
TWO = ".shared .align 4 .b8 s[20];\n.shared .align 4 .b8 q[128];\n"
LAYOUTS = {
    "an array behind another": (
        kernel("st.shared.f32 [%r3], 0f00000000;\nbar.sync 0;\n" + loads("q", [0, 4, 8, 12]) + keep(4), TWO),
        {
            ("st", 32): 1,
            ("ld", 128): 1,
            ("ld", 32): 1,
        },  # q begins at byte 20: its first three words lie in one 16 bytes
    ),
    "dynamic shared memory": (
        kernel("mov.u32 %r3, dynamic;\n" + by_tid(4) + loads("%r5", [0, 4, 8]) + keep(3)),
        {("ld", 128): 1},
    ),
}
TEXTS = {name: (kernel(body), want) for name, (body, want) in CASES.items()} | LAYOUTS


def predicted(text):
    function = reader.parse(text).functions["k"]
    found, joins = Counter(), joined(function)
    for at, instruction in enumerate(function.instructions):
        if in_shared(instruction):
            leader, bits = joins.get(at, (at, 8 * access_bytes(instruction)))
            found[instruction.parts[0], bits] += leader == at
    return {key: n for key, n in found.items() if n}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_joined(name):
    text, want = TEXTS[name]
    assert predicted(text) == want


def tools():
    try:
        import triton
    except ImportError:
        return None
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return folder if (folder / "ptxas").exists() and (folder / "nvdisasm").exists() else None


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory):
    """{name: {(load or store, bits): how many}}: all kernels, assembled at once."""
    folder = tmp_path_factory.mktemp("ptx")
    kernels = (
        text.removeprefix(TOP).replace(".entry k(", f".entry k{n}(") for n, (text, _) in enumerate(TEXTS.values())
    )
    kernels = (re.sub(r"\bk_(out|n)\b", rf"k{n}_\1", text) for n, text in enumerate(kernels))
    kernels = (text.replace("LOOP", f"LOOP{n}") for n, text in enumerate(kernels))
    (folder / "k.ptx").write_text(TOP + "\n".join(kernels))
    subprocess.run([tools() / "ptxas", "-arch=sm_90", "k.ptx", "-o", "k.cubin"], cwd=folder, check=True)
    shown = subprocess.run(
        [tools() / "nvdisasm", "-c", "k.cubin"], cwd=folder, check=True, capture_output=True, text=True
    )
    sections = dict(re.findall(r"^\.text\.k(\d+):\n(.*?)(?=^\.text\.|\Z)", shown.stdout, re.M | re.S))
    return {name: widths(sections[str(n)]) for n, name in enumerate(TEXTS)}


def widths(code):
    found = Counter()
    for name, parts in re.findall(r"\b(LDS|STS)((?:\.\w+)*) ", code):
        bits = next((b for b in (128, 64) if f".{b}" in parts), 8 if "8" in parts else 16 if "16" in parts else 32)
        found["ld" if name == "LDS" else "st", bits] += 1
    return dict(found)


@pytest.mark.skipif(tools() is None, reason="needs Triton's ptxas and nvdisasm")
@pytest.mark.parametrize("name", TEXTS)
def test_it_is_what_ptxas_does(name, machine_code):
    found, want = machine_code[name], TEXTS[name][1]
    unrolled = min(found[key] // n for key, n in want.items()) if set(found) == set(want) else 1
    assert found == {key: n * unrolled for key, n in want.items()}


def test_the_leader_and_the_indices():
    function = reader.parse(TEXTS["any order"][0]).functions["k"]
    at = [n for n, i in enumerate(function.instructions) if in_shared(i)]
    joins = joined(function)
    assert sorted(joins) == at
    groups = {at[n]: {joins[at[m]] for m in numbers} for n, numbers in ((1, (1, 3, 6, 7)), (0, (0, 2, 4, 5)))}
    assert groups == {at[1]: {(at[1], 128)}, at[0]: {(at[0], 128)}}


def test_the_layout_of_shared_variables():
    text = kernel("", ".shared .align 4 .b8 s[20];\n.shared .align 8 .b8 q[12];\n.shared .align 1 .b8 z[3];")
    assert laid_out(reader.parse(text).functions["k"]) == {"s": 0, "q": 24, "z": 36}
    text = TEXTS["an array behind another"][0]
    function = reader.parse(text).functions["k"]
    assert {bits for _, bits in joined(function, {"s": 0, "q": 24}).values()} == {64}  # other places, other pairs


def test_a_function_without_shared_memory_has_no_joins():
    text = kernel("ld.global.f32 %f1, [%rd4];\nld.global.f32 %f2, [%rd4+4];\n" + keep(2))
    assert joined(reader.parse(text).functions["k"]) == {}
