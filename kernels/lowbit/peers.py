"""The public kernels that the low-bit product is measured beside, each called as suits it best.

    8 bits   torch.compile of F.linear(x, codes.to(x.dtype)) * scale: int8, one scale for a row, none for x (bfloat16);
             kernels/compiling.py: with PDL or without, the best of three compiles
             torch._scaled_mm: weights and x in e4m3, a scale for each; it takes 16 rows of x at the least
             gemlite's A16W8: int8, one scale for a row (float16)
    4 bits   torch.ops.aten._weight_int4pack_mm, groups of 128 (bfloat16)
    all      gemlite's A16Wn, the same codes, scales and zeros as ours (float16)

A peer that is not installed, or refuses a case, is left out with a printed sentence. Every family is
(name, {mode: make}, wanted, tolerance); make() returns a call for each copy, to be called in their order. `wanted` is
what they must give, in float64, and `tolerance` how far off they may be, by the norm.
"""

import copy
import functools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels import compiling

FP8_PRODUCTS = 0.06  # of a peer that rounds x and the weights to e4m3: relative error allowed
TOLERANCE = 1e-2  # of the others, against their own dequantised weights, whose products and sums they round
E4M3_MAX = 448.0
GEMLITE_PRESETS = {(9, 0): "h100"}  # by compute capability. gemlite goes by the card's name, and knows no H200
GEMLITE_BENCH = {"warmup": 5, "rep": 20}  # ms of a kernel that it tunes; Triton's 25 and 100 take seconds for a choice


def families(W, Wq, x, copies, tuned):
    """The peers for these weights: W (rows, cols), as Wq holds them quantised; x (m, cols); a number of copies; whether
    those count that try many ways before their first call, which takes seconds.

    Yields (name, {mode: make}, wanted, tolerance).
    """
    if Wq.bits == 8 and tuned:
        way, wanted = compiled(W, x, copies)
        yield way.name, compiling.modes(way), wanted, TOLERANCE
    if Wq.bits == 8:
        yield *_scaled_mm(W, x, copies), FP8_PRODUCTS
    if Wq.bits == 4:
        yield *_int4pack(Wq, x, copies), TOLERANCE
    if tuned and _gemlite() is not None:
        if Wq.bits == 8:
            yield *_gemlite_int8(W, x, copies), TOLERANCE
        yield *_gemlite_linear(Wq, x, copies), TOLERANCE


def _each(run, held):
    """A call for each of these tuples of tensors."""
    return [functools.partial(run, *one) for one in held]


def _clones(copies, *tensors):
    """Tuples of the tensors and of clones of them. A clone keeps its strides."""
    return [tensors, *(tuple(t.clone() for t in tensors) for _ in range(copies - 1))]


def _on_clones(run, copies, *tensors):
    return _each(run, _clones(copies, *tensors))


def _symmetric(W, largest):
    """One scale for a row, so that the largest weight becomes `largest`: (W / scale, scale), in float32."""
    scale = (W.float().abs().amax(1, keepdim=True) / largest).clamp_min(1e-12)
    return W.float() / scale, scale


def compiled(W, x, copies):
    """What torch.compile gets, and what it must give."""
    numbers, scale = _symmetric(W, 127)
    codes, scale, x = numbers.round().to(torch.int8), scale.bfloat16(), x.bfloat16()
    wanted = x.double() @ (codes.double() * scale.double()).T
    torch.compiler.reset()  # it gives up after a few shapes
    held = _clones(copies, codes, scale[:, 0].contiguous())
    return compiling.Way(
        f"int8, {tuple(W.shape)}, {len(x)}",
        "torch.compile, int8",
        lambda codes, scale: F.linear(x, codes.to(x.dtype)) * scale,
        lambda run: _each(run, held),
    ), wanted


def _scaled_mm(W, x, copies):
    x = F.pad(x, (0, 0, 0, max(0, 16 - len(x))))
    numbers, scale = _symmetric(W, E4M3_MAX)
    codes = numbers.to(torch.float8_e4m3fn)
    x_scale = (x.float().abs().amax() / E4M3_MAX).clamp_min(1e-12)
    x_codes = (x.float() / x_scale).to(torch.float8_e4m3fn)
    wanted = x.double() @ W.double().T

    def product(codes, scale, of_x, fast):
        return torch._scaled_mm(
            x_codes, codes.t(), scale_a=of_x, scale_b=scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    one = W.float().abs().amax() / E4M3_MAX
    x_scales = x_scale.expand(len(x), 1).contiguous()
    whole = (W.float() / one).to(torch.float8_e4m3fn)
    kinds = {"one scale": (x_scale, whole, one), "a scale a row": (x_scales, codes, scale)}
    modes = {}
    for kind, (of_x, *held) in kinds.items():
        for fast in (False, True):
            run = functools.partial(product, of_x=of_x, fast=fast)
            modes[kind + (", fast sums" if fast else "")] = functools.partial(_on_clones, run, copies, *held)
    return "torch._scaled_mm, fp8, 16 rows", modes, wanted


def _int4pack(Wq, x, copies):
    """W ~ (code - 8) * scale + zero, so its zero is (8 - zero) * scale."""
    codes, x = Wq.codes(), x.bfloat16()
    scale = Wq.scale.bfloat16()
    zero = ((8 - Wq.zero.float()) * scale.float()).bfloat16()
    both = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()  # (groups, rows, 2)
    W = (codes.double().unflatten(1, (scale.shape[1], -1)) - 8) * scale.double()[..., None] + zero.double()[..., None]
    wanted = x.double() @ W.flatten(1).T
    bytes_ = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
    group, aten = Wq.shape[1] // scale.shape[1], torch.ops.aten

    def make(inner):
        packed = aten._convert_weight_to_int4pack(bytes_, inner)
        return _on_clones(lambda w, s: aten._weight_int4pack_mm(x, w, group, s), copies, packed, both)

    modes = {f"inner tiles {inner}": functools.partial(make, inner) for inner in (2, 4, 8)}
    return "aten int4pack", modes, wanted


@functools.cache
def _gemlite():
    """(gemlite.core, gemlite.helper, the preset it found by the card's name), or None with a sentence, said once."""
    try:
        from gemlite import core, helper
    except Exception as error:  # it looks for a card as it is imported
        print(f"gemlite cannot be imported ({error}): its rows are left out; pip install gemlite")
        return None
    return core, helper, core.GEMLITE_TRITON_CONFIG_CACHE


def _gemlite_linear(Wq, x, copies):
    """W ~ (code - zero) * scale, as ours. It tunes itself at the first call, or goes by a preset."""
    x = x.half()
    codes, scale, zero = Wq.codes(), Wq.scale.half(), Wq.zero.half()
    groups = scale.shape[1]
    W = (codes.double().unflatten(1, (groups, -1)) - zero.double()[..., None]) * scale.double()[..., None]
    wanted = x.double() @ W.flatten(1).T

    def make(preset=None):
        made = _gemlite()[1].A16Wn(device=x.device, dtype=torch.float16)
        return _tuned(made.from_weights(codes, scale, zero, Wq.bits, codes.shape[1] // groups), x, copies, preset)

    modes = {"A16Wn": make}
    preset = _preset(x, Wq)
    if preset is not None:
        modes[f"A16Wn, its preset for {preset.stem.upper()}"] = functools.partial(make, preset)
    return "gemlite", modes, wanted


def _gemlite_int8(W, x, copies):
    """Its own way with 8 bits: int8, one scale for a row and no zero."""
    x = x.half()
    numbers, scale = _symmetric(W, 127)
    codes, scale = numbers.round().to(torch.int8), scale.half()
    wanted = x.double() @ (codes.double() * scale.double()).T

    def make(post_scale):
        made = _gemlite()[1].A16W8(device=x.device, dtype=torch.float16, post_scale=post_scale)
        return _tuned(made.from_weights(codes, scales=scale), x, copies)

    modes = {"A16W8": functools.partial(make, False), "A16W8, scale last": functools.partial(make, True)}
    return "gemlite, int8", modes, wanted


def _preset(x, Wq):
    """The file of presets that gemlite ships for this chip, if it has this case; None."""
    name = GEMLITE_PRESETS.get(torch.cuda.get_device_capability(x.device)) if x.is_cuda else None
    if name is None:
        return None
    path = Path(_gemlite()[0].__file__).with_name("configs") / f"{name}.json"
    # rows of x, rows, columns, columns of a group, codes in a word, and the types: float16 x, so many bits
    case = f"({len(x)}, {Wq.shape[0]}, {Wq.shape[1]}, {Wq.group}, {32 // Wq.bits}, {100 + Wq.bits})"
    return path if path.is_file() and f'"{case}"' in path.read_text() else None


def _tuned(layer, x, copies, preset=None):
    """A call for this layer of gemlite's and for each copy of it. Its tuners keep one choice for a shape and dtypes; so
    each of these lists has a memory of its own, which its first call puts in place."""
    import triton.testing

    core, _, found_by_name = _gemlite()
    core.GEMLITE_TRITON_CONFIG_CACHE = {} if preset else found_by_name
    if preset and not core.GemLiteLinear.load_config(str(preset)):
        raise RuntimeError(f"gemlite cannot read {preset.name}")
    layers = [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]
    found = [(tuner, {}) for tuner in _tuners()]
    for tuner, _ in found:
        tuner.do_bench = functools.partial(triton.testing.do_bench, **GEMLITE_BENCH)

    def first():
        for tuner, choices in found:
            tuner.cache = choices
        return layers[0](x)

    first()
    return [first, *(functools.partial(one, x) for one in layers[1:])]


def _tuners():
    """gemlite's kernels that choose among several ways to be compiled."""
    modules = [module for name, module in sys.modules.items() if name.startswith("gemlite.triton_kernels.")]
    values = [value for module in modules for value in vars(module).values()]
    return list({id(value): value for value in values if type(value).__name__ == "Autotuner"}.values())
