"""Hostile calls for kernels that run SSD backwards, and what they are held to, in float64.

    for name in CASES: check(gradients, name, torch.bfloat16)                     small: for the SIMT machine
    for name in CARD: check(gradients, name, torch.bfloat16, device="cuda")       large: for a card

gradients(dy, x, dt, A, B, C, *, dfinal_states, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
dt_limit) returns what has the fields of ref.ssd_backward.Gradients. What is not in a case is not handed over.
"""

import math

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from kernels.ssd.five import sequence_numbers
from kernels.ssd_backward.plain import wide_gradients
from ref.ssd import seq_idx_of
from ref.ssd_backward import Gradients
from ref.ssd_backward import gradients as reference

ALLOWED = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # ‖found - wanted‖ / ‖wanted‖
EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}
EVERYTHING = "D per column, z, dt_bias, softplus, limit, initial_states, dfinal_states"
PLAIN = ""
MAMBA = "D, dt_bias, softplus"  # what mamba_ssm's layers hand over, but z, which their norm takes

# batch, seqlen, nheads, headdim, ngroups, dstate; options; then what else is special
CASES = {
    "one token of one number": ((1, 1, 1, 8, 1, 16), PLAIN),
    "one token, everything": ((2, 1, 2, 64, 1, 64), EVERYTHING),
    "a chunk": ((1, 64, 2, 64, 1, 64), MAMBA),
    "a token less": ((1, 63, 2, 64, 1, 64), EVERYTHING),
    "a token more": ((1, 65, 2, 64, 1, 64), EVERYTHING),
    "three chunks, odd heads": ((2, 187, 3, 64, 1, 64), EVERYTHING),
    "groups": ((1, 130, 6, 64, 3, 64), MAMBA + ", dfinal_states"),
    "a group of seven": ((1, 140, 7, 64, 1, 64), MAMBA),
    "wide state": ((1, 150, 2, 64, 1, 128), EVERYTHING),
    "wide head": ((1, 130, 2, 128, 2, 64), EVERYTHING),
    "columns that fill no tile": ((1, 100, 3, 80, 1, 40), EVERYTHING),
    "few columns": ((1, 67, 2, 8, 1, 8), EVERYTHING),
    "prime sizes": ((1, 71, 2, 13, 1, 29), EVERYTHING),
    "slow decay": ((1, 200, 2, 64, 1, 64), MAMBA, dict(rate=0.01)),
    "fast decay": ((1, 200, 2, 64, 1, 64), MAMBA, dict(rate=30.0)),
    "no decay, as linear attention": ((1, 130, 2, 64, 1, 64), PLAIN, dict(rate=0.0)),
    "a huge step": ((1, 130, 2, 64, 1, 64), MAMBA, dict(step=90)),
    "limits that clip": ((1, 130, 2, 64, 1, 64), "D, dt_bias, softplus, narrow limit"),
    "dt as it is, below 0 too": ((1, 70, 2, 64, 1, 64), "D, z"),
    "dt in float32": ((1, 70, 2, 64, 1, 64), MAMBA, dict(dt_dtype=torch.float32)),
    "views of one projection": ((2, 130, 4, 64, 2, 64), MAMBA + ", z", dict(views=True)),
    "sequences": ((2, 150, 2, 64, 1, 64), EVERYTHING, dict(begins=(0, 40, 41, 64, 130))),
    "a sequence that ends with a chunk": ((1, 192, 2, 64, 1, 64), EVERYTHING, dict(begins=(0, 64, 128))),
    "sequences end to end": ((1, 150, 2, 64, 1, 64), EVERYTHING, dict(ends=(0, 40, 40, 64, 65, 150))),
}
CARD = {
    "2.7B, 2K": ((1, 2048, 80, 64, 1, 128), MAMBA),
    "2.7B, odd length, everything": ((1, 4099, 80, 64, 1, 128), EVERYTHING),
    "a batch of short ones": ((8, 777, 80, 64, 1, 128), EVERYTHING),
    "many groups": ((2, 1000, 64, 64, 8, 128), EVERYTHING),
    "wide heads, 5 groups of one": ((2, 1009, 5, 128, 5, 64), EVERYTHING),
    "130M": ((4, 1024, 24, 64, 1, 128), MAMBA, dict(views=True)),
    "a state of 256": ((1, 700, 8, 64, 1, 256), EVERYTHING),
    "columns that fill no tile": ((1, 999, 24, 80, 1, 136), EVERYTHING),
    "16K, few heads": ((1, 16384, 4, 64, 1, 128), MAMBA),
    "slow decay": ((1, 4099, 16, 64, 1, 128), MAMBA, dict(rate=0.01)),
    "fast decay": ((1, 4099, 16, 64, 1, 128), MAMBA, dict(rate=30.0)),
    "sequences": ((2, 3000, 24, 64, 1, 128), EVERYTHING, dict(begins=(0, 1, 64, 500, 1023, 2048, 2999))),
    "sequences end to end": ((1, 3000, 24, 64, 1, 128), EVERYTHING, dict(ends=(0, 700, 700, 704, 1920, 3000))),
}


def call_of(name, dtype, device="cpu", cases=None):
    """(dy, the other tensors and options by name): the same on every device."""
    shape, options, *special = (cases or (CASES if device == "cpu" else CARD))[name]
    return make(shape, options, dtype, device, **(special[0] if special else {}))


def make(
    shape, options=EVERYTHING, dtype=torch.bfloat16, device="cpu", *, rate=4.0, step=None, dt_dtype=None, views=False,
    begins=None, ends=None, seed=0,
):  # fmt: skip
    """(dy, the other tensors and options by name). rate: A lies between -rate / 8 and -rate. step: of one token."""
    batch, L, H, P, G, N = shape
    given = [option.strip() for option in options.split(",")]
    g = torch.Generator().manual_seed(seed + 1000 * L + H)

    def draw(*size, as_type=dtype):
        return torch.randn(size, generator=g).to(as_type).to(device)

    call = {"x": draw(batch, L, H, P), "dt": draw(batch, L, H, as_type=dt_dtype or dtype)}
    call["dt"] = call["dt"] - 2 if "softplus" in given else 0.3 * call["dt"] + 0.1
    call["A"] = torch.linspace(-rate, -rate / 8, H).to(device)
    call |= {"B": draw(batch, L, G, N) / N**0.25, "C": draw(batch, L, G, N) / N**0.25}
    if step is not None:
        call["dt"][:, L // 2] = step
    if views:  # as a layer has them: of one projection, z first
        parts = [draw(batch, L, H * P), *(call[name].flatten(2) for name in ("x", "B", "C")), call["dt"].to(dtype)]
        parts = torch.cat([*parts, draw(batch, L, -sum(p.shape[2] for p in parts) % 8)], -1)
        z, x, B, C, dt, _ = parts.split([H * P, H * P, G * N, G * N, H, parts.shape[2] - 2 * (H * P + G * N) - H], -1)
        call |= {"x": x.unflatten(-1, (H, P)), "B": B.unflatten(-1, (G, N)), "C": C.unflatten(-1, (G, N)), "dt": dt}
        if "z" in given:
            call["z"] = z.unflatten(-1, (H, P))
    wide = torch.float32
    further = {
        "D": lambda: {"D": draw(H, as_type=wide)},
        "D per column": lambda: {"D": draw(H, P, as_type=wide)},
        "z": lambda: {} if views else {"z": draw(batch, L, H, P)},
        "dt_bias": lambda: {"dt_bias": 0.5 * draw(H, as_type=wide)},
        "softplus": lambda: {"dt_softplus": True},
        "limit": lambda: {"dt_limit": (0.01, 0.5)},
        "narrow limit": lambda: {"dt_limit": (0.1, 0.2)},
        "initial_states": lambda: {"initial_states": draw(batch, H, P, N, as_type=wide)},
        "dfinal_states": lambda: {"dfinal_states": draw(batch, H, P, N, as_type=wide)},
    }
    for option in filter(None, given):
        call |= further[option]()
    if begins is not None:
        fresh = torch.zeros(batch, L, dtype=torch.int32)
        fresh[:, list(begins)] = 1
        call["seq_idx"] = fresh.cumsum(1).int().to(device)
    if ends is not None:
        call["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    return draw(batch, L, H, P), call


def truth(dy, call):
    """ref.ssd_backward's gradients of the very same numbers, as float64 tensors on the CPU. On a card, where NumPy
    takes minutes: the same by torch in float64 (kernels/ssd_backward/plain.py, held against NumPy on the CPU)."""
    if dy.is_cuda:
        call = dict(call)
        if (ends := call.pop("cu_seqlens", None)) is not None:
            call["seq_idx"] = sequence_numbers(ends, dy.shape[1])
        return wide_gradients(dy, **call, wide=torch.float64)
    numbers = {k: v.double().cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    if "seq_idx" in call:
        numbers["seq_idx"] = call["seq_idx"].cpu().numpy()
    if "cu_seqlens" in call:
        numbers["seq_idx"] = seq_idx_of(call["cu_seqlens"].cpu().numpy())
        del numbers["cu_seqlens"]
    found = reference(dy.double().cpu().numpy(), **numbers)
    return Gradients(*(None if v is None else torch.from_numpy(np.ascontiguousarray(v)) for v in found))


class Poisoned(TorchFunctionMode):
    """Where new memory holds NaN until it is written."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function in EMPTY and made.is_floating_point():
            made.fill_(math.nan)
        return made


def check(gradients, name, dtype, device="cpu", allowed=None, again=False, cases=None, **how):
    """Run a case in poisoned memory and hold each gradient to float64. → {gradient: error}

    AssertionError names the case and every gradient that is off, with its error. again: run twice, and ask for the
    same bits. how: further arguments, as chunk_size.
    """
    dy, call = call_of(name, dtype, device, cases)
    before = {k: v.clone() for k, v in (call | {"dy": dy}).items() if isinstance(v, torch.Tensor)}
    if device != "cpu":
        torch.full((1 << 26,), math.nan, device=device)  # goes back to the allocator at once
    with Poisoned():
        found = gradients(dy, **call, **how)
    for k, v in before.items():
        assert torch.equal(v, (call | {"dy": dy})[k]), f"{name}: {k} was written to"
    if again:
        with Poisoned():
            twice = gradients(dy, **call, **how)
        for k in Gradients._fields:
            one, other = getattr(found, k), getattr(twice, k)
            assert one is None or torch.equal(one, other), f"{name}: {k} has other bits in a second run"
    return compare(name, found, dy, call, ALLOWED[dtype] if allowed is None else allowed)


def compare(name, found, dy, call, allowed):
    """Hold gradients that were found to float64. → {gradient: error}, or AssertionError with all that are off."""
    wanted, errors, wrong = truth(dy, call), {}, []
    for k, right in wanted._asdict().items():
        one = getattr(found, k)
        if right is None:
            assert one is None, f"{name}: {k} was not given, and has a gradient"
            continue
        assert one is not None, f"{name}: {k} has no gradient"
        assert one.shape == call[k].shape, f"{name}: {k} {tuple(one.shape)}, not {tuple(call[k].shape)}"
        assert one.dtype is call[k].dtype, f"{name}: {k} in {one.dtype}, not {call[k].dtype}"
        off, size = (one.double() - right.to(one.device)).norm().item(), right.norm().item()
        if size < 1e-9:  # nothing reaches it, as A where there is one token: the terms of the sum say what is small
            size = (dy.double().norm() * call["x"].double().norm()).item()
        errors[k] = off / size
        if not errors[k] <= allowed:  # NaN is wrong, too
            wrong.append(f"{k} {errors[k]:.2g}")
    assert not wrong, f"{name}: {', '.join(wrong)}; allowed are {allowed:.2g}. All: {errors}"
    return errors
