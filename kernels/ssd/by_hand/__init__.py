"""Chapter 15's rungs: the fused SSD by hand, in five steps, of which the last is `kernels.ssd.fused`.

    rung(x, dt, A, B, C, *, D, dt_bias, dt_softplus=True, out=None)

    chunk     one warpgroup has a head, and does all of a chunk, step after step
    ring      tiles come ahead of time
    roles     a pair of heads in a block, a role for each kind of work
    shares    equal shares of one line of chunks, and a chain between blocks: fused.cu, which walks all of pass 1
    fused     what fused.cu is: pass 1 ends where nothing is left, and heads that forget alike are pairs

x (batch, L, H, 64), B and C (batch, L, G, 64 or 128), of one dtype, float16 or bfloat16; dt (batch, L, H), A, D and
dt_bias (H,); all contiguous, D and dt_bias float32, with softplus. y like x. The first three take nothing else: they
are rungs to climb. CUDA tensors run on their card, a Hopper card, CPU tensors on the SIMT machine.
"""

import functools
from pathlib import Path

import torch

from kernels.ssd.arguments import expect_ssd
from kernels.ssd.fused import SOURCES, TYPES, _line, fused
from kernels.ssd.fused_plan import STAGES, shared_bytes
from lab import Rung, cuda
from lab.card import capability
from lab.source import inlined
from lab.tensor_map import TensorMap

HERE = Path(__file__).resolve().parent
TILE, REST = 8192, 4096  # bytes of a tile; room for decays of a chunk and mbarriers


def chunk(x, dt, A, B, C, *, D, dt_bias, dt_softplus=True, out=None):
    """Rung 1: one warpgroup has a head, one chunk after the other."""
    return _run("chunk", x, dt, A, B, C, D, dt_bias, dt_softplus, out)


def ring(x, dt, A, B, C, *, D, dt_bias, dt_softplus=True, out=None):
    """Rung 2: tiles come ahead of time."""
    return _run("ring", x, dt, A, B, C, D, dt_bias, dt_softplus, out)


def roles(x, dt, A, B, C, *, D, dt_bias, dt_softplus=True, out=None):
    """Rung 3: a pair of heads in a block, and roles."""
    return _run("roles", x, dt, A, B, C, D, dt_bias, dt_softplus, out)


def shares(x, dt, A, B, C, *, D, dt_bias, dt_softplus=True, out=None):
    """Rung 4: equal shares of one line of chunks. fused.cu, where nothing is negligible."""
    return fused(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, out=out, stop=0)


def counters(name, x, dt, A, B, C, *, D, dt_bias, dt_softplus=True, check_races=False, changes=()):
    """Run one of the first three rungs on the SIMT machine. Returns its report (simt.report).

    changes  (old, new): what is replaced in its source or in what that includes, once each, to see what goes wrong
    """
    x, dt, A, B, C, D, dt_bias = (tensor.cpu() for tensor in (x, dt, A, B, C, D, dt_bias))
    _expect(name, x, dt, A, B, C, D, dt_bias, dt_softplus, None)
    out = torch.empty_like(x)
    return _launch(name, x, dt, A, B, C, D, dt_bias, out, changes=tuple(changes), check_races=check_races)


def resources(name, dstate=128):
    """What the compiler says of a rung: registers and spills of a thread."""
    return _kernel(name, torch.float16, torch.float16, dstate)[0].module.resources()[name]


def _run(name, x, dt, A, B, C, D, dt_bias, dt_softplus, out):
    _expect(name, x, dt, A, B, C, D, dt_bias, dt_softplus, out)
    out = torch.empty_like(x) if out is None else out
    _launch(name, x, dt, A, B, C, D, dt_bias, out)
    return out


def _expect(name, x, dt, A, B, C, D, dt_bias, dt_softplus, out):
    """What the first three rungs take. `fused` takes the rest."""
    problem = expect_ssd(name, x, dt, A, B, C, D=D, dt_bias=dt_bias, out=out)
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"{name}: x must be float16 or bfloat16, got {x.dtype}")
    if problem.headdim != 64 or problem.dstate not in (64, 128):
        found = f"{problem.headdim} and {problem.dstate}"
        raise ValueError(f"{name}: headdim must be 64 and dstate 64 or 128, got {found}; fused takes others")
    for what, tensor in {"D": D, "dt_bias": dt_bias}.items():
        if tensor is None or tensor.ndim != 1 or tensor.dtype is not torch.float32:
            found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            raise ValueError(f"{name}: {what} must be ({problem.nheads},) float32, got {found}; fused takes others")
    if not dt_softplus:
        raise ValueError(f"{name}: dt_softplus must be True, got {dt_softplus!r}; fused takes others")
    for what, tensor in {"x": x, "dt": dt, "B": B, "C": C}.items():
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"{name}: {what} must be contiguous, at an address of 16 bytes; fused takes others")
    if (has := capability(x.device)) != (9, 0):
        raise RuntimeError(
            f"{name}: compute capability 9.0 is needed, this card has {has}; kernels.ssd.five runs there"
        )


def _launch(name, x, dt, A, B, C, D, dt_bias, out, *, changes=(), **options):
    batch, seqlen, heads, _ = x.shape
    groups, dstate = B.shape[2:]
    kernel, shared = _kernel(name, x.dtype, dt.dtype, dstate, changes)
    blocks, threads = batch * heads, 128
    if name == "roles":
        blocks, threads = batch * groups * -(-heads // groups // 2), 512
    maps = _tiles(x, 1), _tiles(B, dstate // 64), _tiles(C, dstate // 64), _tiles(out, 1)
    numbers = seqlen, heads, groups, *dt.stride()
    return kernel(blocks, threads, *maps, _line(dt), A, dt_bias, D, *numbers, shared=shared, **options)


def _tiles(tensor, together):
    """A (batch, seqlen, n, columns) tensor as (batch, n, columns / 64, seqlen, 64), in boxes of so many tiles."""
    batch, seqlen, n, columns = tensor.shape
    b, t, h, _ = tensor.stride()
    tiles = tensor.as_strided((batch, n, columns // 64, seqlen, 64), (b, h, 64, t, 1))
    return TensorMap(tiles, (1, 1, together, 64, 64), 128)


@functools.cache
def _kernel(name, dtype, dt, dstate, changes=()):
    """A rung's kernel, and the bytes of shared memory that it takes."""
    steps = f"Steps<{TYPES[dt]}, float, true>"
    shape = f"Shape<{TYPES[dtype]}, 64, {dstate}, {steps}, Skip<float, D_PER_HEAD>, NO_Z, float>"
    options = [f"-DSHAPE={shape}"]
    if name == "roles":
        shared = shared_bytes(dstate, False)
        options.append(f"-DSHARED_BYTES={shared}")
    else:
        chunks = STAGES if name == "ring" else 1
        shared = chunks * (1 + dstate // 32) * TILE + TILE + REST
    if not changes:
        return cuda.load(HERE / f"{name}.cu", tuple(options), arch="sm_90a")[name], shared
    source = inlined(f"kernels/ssd/by_hand/{name}.cu")
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{name}: {old!r} must stand there once, it stands there {source.count(old)} times")
        source = source.replace(old, new)
    return cuda.compile(source, tuple(options), name=f"{name}.cu", arch="sm_90a")[name], shared


def _rung(title, function):
    sources = tuple(f"kernels/ssd/by_hand/{file}" for file in (f"{function.__name__}.cu", "__init__.py"))
    return Rung(function.__name__, title, function, sources)


RUNGS = [
    _rung("one warpgroup a head", chunk),
    _rung("tiles ahead, in a ring", ring),
    _rung("a pair of heads, roles", roles),
    Rung("shares", "equal shares, a chain", shares, (*SOURCES, "kernels/ssd/by_hand/__init__.py")),
    Rung("fused", "fused.cu", fused, SOURCES),
]
