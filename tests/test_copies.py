"""Copies into shared memory, as ptxas writes them: no uniform register in their address (kernels/device/hidden.cuh).

ptxas 13.0 is the one that is known to write them, and for a card they are illegal instructions. What is compiled here
is what is measured, and what once had them.
"""

import re
import sys
from pathlib import Path

import pytest

from kernels.lowbit.plan import plan
from lab import cuda
from lab.cuda import disassembly

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
KERNELS = Path(__file__).resolve().parent.parent / "kernels"
ROOM = 227 * 1024  # bytes of shared memory that a block may have on an H200
UNIFORM = re.compile(r"\bLDGSTS\.\S* \[[^]]*UR")


def lowbit(rows, cols, bits, m):
    found = plan(rows, cols, m, bits, 128 if bits < 8 else 0, 2, 132, ROOM)
    return f"lowbit/{found.source}", *found.options("__half", "__half")


CASES = [
    ("gemv/ring.cu", "-DSHAPE=Shape<__half, 512, 1, 8, 3, 2, TensorCores>"),
    ("gemv/ring.cu", "-DSHAPE=Shape<__nv_bfloat16, 448, 4, 2, 3, 3, MultiplyAdds>"),
    ("gemv/unaligned_ring.cu", "-DSHAPE=Shape<Sizes<__half, 8, 544, 1, 8>, 3, 2>"),
    ("gemv/unaligned_ring.cu", "-DSHAPE=Shape<Sizes<__nv_bfloat16, 8, 608, 3, 2>, 3, 3, MultiplyAdds>"),
    ("fusion/norm_qkv.cu", "-DSHAPE=Shape<__half, 1, 4, 6>"),
    ("fusion/layer.cu", "-DSHAPE=Shape<__nv_bfloat16, 1, 4, 6, 4, 1>"),
    ("attention/decode.cu", "-DSHAPE=Shape<__half, 128, 4>", "-DSCHEDULE=Schedule<4, 16, 4, 0, 0>", "-DRING_STAGES=3"),
    ("attention/decode.cu", "-DSHAPE=Shape<__nv_bfloat16, 256, 16>", "-DSCHEDULE=Schedule<2, 16, 1, 0, 0>",
     "-DRING_STAGES=1"),
    ("kv_cache/decode.cu", "-DSHAPE=Shape<__half, 128, 4>", "-DCACHE=Cache<Fp8, Fp8, 128, 0, 128>", "-DRING_STAGES=2"),
    ("kv_cache/decode.cu", "-DSHAPE=Shape<__half, 128, 4>", "-DCACHE=Cache<Int4, Int4, 32, 0, 32>", "-DRING_STAGES=2"),
    ("paged/decode_codes.cu", "-DSHAPE=Shape<__half, 128, 4>", "-DCACHE=Cache<Fp8, Fp8, 0, 128, 128>",
     "-DTEAM_WARPS=1"),
    ("paged/decode_codes.cu", "-DSHAPE=Shape<__half, 128, 4>", "-DCACHE=Cache<Int4, Int4, 0, 32, 32>",
     "-DRING_STAGES=3"),
    ("llm/one_launch.cu", "-DSHAPE=Shape<__half, 128, 4>", "-DSCHEDULE=Schedule<4, 16, 1, false, false>",
     "-DSIZES=Sizes<4096, 32, 14336, false, false, 32768, 6>", "-DMEMORY=32768"),
    ("mamba2/norm_in_proj.cu", "-DSHAPE=Shape<__half, 1, 4, 6>", "-DRESIDUAL=float", "-DWIDTH=4"),
    ("mamba2/norm_out_proj.cu", "-DSHAPE=Shape<__half, 2, 2, 6>", "-DRESIDUAL=float", "-DNORM=1"),
    lowbit(4096, 14336, 2, 1),
    lowbit(4096, 4096, 4, 16),
    lowbit(4096, 14336, 4, 16),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1].removeprefix('-DSHAPE=Shape')}")
def test_copies_have_no_uniform_part_in_their_address(case):
    try:
        disassembly.find_tool()
    except RuntimeError:
        pytest.skip("needs nvdisasm, which comes with Triton")
    name, *options = case
    code = cuda.load(KERNELS / name, options, arch="sm_90a" if name.startswith("llm") else None).sass()
    assert "LDGSTS" in code and not UNIFORM.search(code)


def test_such_a_copy_would_be_seen():
    """As ptxas 13.0 wrote it, and as the card takes it."""
    assert UNIFORM.search("@P6 LDGSTS.E.BYPASS.LTC128B.128 [R9+UR0], desc[UR1][R208.64] ;")
    assert not UNIFORM.search("LDGSTS.E.BYPASS.LTC128B.128 [R55+0x1000], desc[UR4][R36.64] ;")
