"""The public kernels that the low-bit product is measured beside, each called as suits it best.

    8 bits   torch.compile of F.linear(x, codes.to(x.dtype)) * scale: int8, one scale for a row, none for x (bfloat16)
             torch._scaled_mm: weights and x in e4m3, a scale for each; it takes 16 rows of x at the least
    4 bits   torch.ops.aten._weight_int4pack_mm, groups of 128 (bfloat16)
    all      gemlite's A16Wn, the same codes, scales and zeros as ours (float16)

A peer that is not installed, or refuses a case, is left out with a printed sentence. Every family is
(name, {mode: make}, wanted); make() returns a call for each copy, and `wanted` is what it must give, in float64.
"""

import copy
import functools

import torch
import torch.nn.functional as F

FP8_PRODUCTS = 0.06  # of a peer that rounds x and the weights to e4m3: relative error allowed
TOLERANCE = 1e-2  # of the others, against their own dequantised weights, whose products and sums they round
E4M3_MAX = 448.0


def families(W, Wq, x, copies):
    """The peers for these weights: W (rows, cols), as Wq holds them quantised; x (m, cols); a number of copies.

    Yields (name, {mode: make}, wanted, tolerance).
    """
    if Wq.bits == 8:
        yield *_compiled(W, x, copies), TOLERANCE
        yield *_scaled_mm(W, x, copies), FP8_PRODUCTS
    if Wq.bits == 4:
        yield *_int4pack(Wq, x, copies), TOLERANCE
    if _gemlite() is not None:
        yield *_gemlite_linear(Wq, x, copies), TOLERANCE


def _each(run, held):
    """A call for each of these tuples of tensors."""
    return [functools.partial(run, *one) for one in held]


def _clones(copies, *tensors):
    """Tuples of the tensors and of clones of them. A clone keeps its strides."""
    return [tensors, *(tuple(t.clone() for t in tensors) for _ in range(copies - 1))]


def _symmetric(W, largest):
    """One scale for a row, so that the largest weight becomes `largest`: (W / scale, scale), in float32."""
    scale = (W.float().abs().amax(1, keepdim=True) / largest).clamp_min(1e-12)
    return W.float() / scale, scale


def _compiled(W, x, copies):
    numbers, scale = _symmetric(W, 127)
    codes, scale, x = numbers.round().to(torch.int8), scale.bfloat16(), x.bfloat16()
    wanted = x.double() @ (codes.double() * scale.double()).T
    torch.compiler.reset()  # it gives up after a few shapes
    run = torch.compile(
        lambda codes, scale: F.linear(x, codes.to(x.dtype)) * scale,
        mode="max-autotune-no-cudagraphs",
        dynamic=False,
    )
    make = functools.partial(_each, run, _clones(copies, codes, scale[:, 0].contiguous()))
    return "torch.compile, int8", {"max-autotune": make}, wanted


def _scaled_mm(W, x, copies):
    x = F.pad(x, (0, 0, 0, max(0, 16 - len(x))))
    numbers, scale = _symmetric(W, E4M3_MAX)
    codes = numbers.to(torch.float8_e4m3fn)
    x_scale = (x.float().abs().amax() / E4M3_MAX).clamp_min(1e-12)
    x_codes = (x.float() / x_scale).to(torch.float8_e4m3fn)
    wanted = x.double() @ W.double().T

    def tensorwise(codes, one):
        return torch._scaled_mm(x_codes, codes.t(), scale_a=x_scale, scale_b=one, out_dtype=torch.bfloat16)

    def rowwise(codes, scale):
        return torch._scaled_mm(x_codes, codes.t(), scale_a=x_scales, scale_b=scale.t(), out_dtype=torch.bfloat16)

    one = W.float().abs().amax() / E4M3_MAX
    x_scales = x_scale.expand(len(x), 1).contiguous()
    whole = (W.float() / one).to(torch.float8_e4m3fn)
    modes = {
        "one scale": functools.partial(_each, tensorwise, _clones(copies, whole, one)),
        "a scale a row": functools.partial(_each, rowwise, _clones(copies, codes, scale)),
    }
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
        return _each(lambda w, s: aten._weight_int4pack_mm(x, w, group, s), _clones(copies, packed, both))

    modes = {f"inner tiles {inner}": functools.partial(make, inner) for inner in (2, 4, 8)}
    return "aten int4pack", modes, wanted


@functools.cache
def _gemlite():
    """The module, or None with a sentence, said once."""
    try:
        from gemlite import helper
    except Exception as error:  # it looks for a card as it is imported
        print(f"gemlite cannot be imported ({error}): its rows are left out; pip install gemlite")
        return None
    return helper


def _gemlite_linear(Wq, x, copies):
    """Its own choice of kernel, which it tunes at the first call. W ~ (code - zero) * scale, as ours."""
    x = x.half()
    codes, scale, zero = Wq.codes(), Wq.scale.half(), Wq.zero.half()
    groups = scale.shape[1]
    W = (codes.double().unflatten(1, (groups, -1)) - zero.double()[..., None]) * scale.double()[..., None]
    wanted = x.double() @ W.flatten(1).T

    def make():
        made = _gemlite().A16Wn(device=x.device, dtype=torch.float16)
        first = made.from_weights(codes, scale, zero, Wq.bits, codes.shape[1] // groups)
        layers = [first, *(copy.deepcopy(first) for _ in range(copies - 1))]
        return [functools.partial(layer, x) for layer in layers]

    return "gemlite", {"A16Wn": make}, wanted
