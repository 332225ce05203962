"""Variants of attention: a line or two of CUDA C++, compiled when they are first used.

    paged.decode(q, cache, requests, variant=Variant(score="cap * tanhf(s / cap)", params={"cap": 30.0}))

The lines see, as numbers: s, the scaled score, in natural units; request, its place in the call; head, of all query
heads; token and position, of the query, from 0. What they are given else, `params`, they see by name.

Ready-made:

    sliding_window(n)          a query sees n tokens, its own the last: what is in front of all of them is not read
    soft_cap(cap)              scores between -cap and cap, by tanh
    alibi(slopes)              a head's slope for each token of distance; slopes float32 (n_heads,)
    custom_mask(mask)          bool (n_requests, tokens): which tokens of a request are seen at all
    rope(theta, head_dim, d)   keys lie in the cache as they came and are turned when read, queries too; on device d
"""

import functools
import math
import re
from pathlib import Path

import torch

from lab import cuda

HERE = Path(__file__).resolve().parent
SEES = {  # each function: what it returns, its parameters, whether it may read tensors
    "score": ("float", "float s, int request, int head, int token, int position", True),
    "keep": ("bool", "int request, int head, int token, int position", True),
    "first_token": ("int", "int position", False),
    "turns": ("unsigned", "int token, int pair", True),
}
POINTERS = {
    torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.int32: "int",
    torch.int64: "long long", torch.uint8: "unsigned char", torch.int8: "signed char", torch.bool: "bool",
}  # fmt: skip
TAKEN = {"s", "request", "head", "token", "position", "pair"}


class Variant:
    """What a variant of attention changes. Each line is an expression of CUDA C++, or statements with a `return`.

    score        the new score, in natural units, from s
    keep         whether a query sees a token; later ones than its own it never does
    first_token  the first token that a query at `position`, or behind it, may see: what lies in front is not read. Must
                 not fall as position grows, and `keep` must say no in front of it. Sees no tensor
    turns        how far dimensions `pair` and pair + head_dim / 2 of a token's key, and of a query at that position,
                 are turned in their plane: an unsigned number, 2**32 all around. head_dim is then a multiple of 32
    params       what the lines see by name. A number becomes part of the code: another one is compiled anew. A tensor,
                 contiguous and on q's device, is seen as a pointer to its elements

    TypeError or ValueError names what is wrong here. Whether a line compiles shows in the first call: CompileError,
    with NVRTC's words and the line.
    """

    def __init__(self, *, score=None, keep=None, first_token=None, turns=None, params=None, _sizes=None):
        lines = {"score": score, "keep": keep, "first_token": first_token, "turns": turns}
        self.lines = {name: line for name, line in lines.items() if line is not None}
        if not self.lines:
            raise ValueError(f"Variant: one of {', '.join(lines)} must be given, got none")
        for name, line in self.lines.items():
            if not isinstance(line, str):
                raise TypeError(f"Variant: {name} must be a str of CUDA C++, got {type(line).__name__}")
            if not line.strip():
                raise ValueError(f"Variant: {name} must not be empty")
        self.params, self._sizes = dict(params or {}), _sizes or {}  # {tensor's name: (what, its first size, of q)}
        self.tensors = tuple(value for value in self.params.values() if isinstance(value, torch.Tensor))
        members = [_member(name, value) for name, value in self.params.items()]
        self.text, self.skips = self._struct(members), "first_token" in self.lines
        self.scores = "score" in self.lines or "keep" in self.lines  # then natural units come to the kernel

    def __repr__(self):
        return f"Variant({', '.join(f'{name}={line!r}' for name, line in self.lines.items())})"

    def expect(self, where, q):
        """Raise unless the tensors are on q's device, those of ready-made variants are as large as they must be, and
        head_dim is one that can be turned."""
        if "turns" in self.lines and q.shape[-1] % 32:
            raise ValueError(f"{where}: variant: head_dim must be a multiple of 32 to be turned, got {q.shape[-1]}")
        for name, (what, size) in self._sizes.items():
            found, wanted = self.params[name].shape[0], size(q)
            if found != wanted:
                raise ValueError(f"{where}: variant: {name} must be for {wanted} {what}, like q, got {found}")
        for name, value in self.params.items():
            if isinstance(value, torch.Tensor) and value.device != q.device:
                raise ValueError(f"{where}: variant: {name} must be on {q.device}, like q, got one on {value.device}")

    def _struct(self, members):
        """The text in front of a kernel's own."""
        pointers = [(n, f"const {POINTERS[v.dtype]} *{n}") for n, v in self.params.items() if torch.is_tensor(v)]
        made = ", ".join(["{}", *(f"of_{name}" for name, _ in pointers)])
        listed = " ".join(f"const {POINTERS[self.params[name].dtype]} *of_{name}," for name, _ in pointers)
        flags = {"SCORES": {"score", "keep"}, "SKIPS": {"first_token"}, "TURNS": {"turns"}}
        flags = ", ".join(f"{name} = {'true' if of & set(self.lines) else 'false'}" for name, of in flags.items())
        text = [
            "#include <cuda_bf16.h>",
            "#include <cuda_fp16.h>",
            f"#define VARIANT_TENSORS {listed}",
            f"#define VARIANT_MADE {{{made}}}",
            '#include "variant.cuh"',
            "struct Variant : PlainVariant {",
            f"    static constexpr bool {flags};",
            *(f"    {member};" for member in members),
        ]
        for name, line in self.lines.items():
            kind, parameters, reads = SEES[name]
            expression = not re.search(r"\breturn\b", line)
            text.append(
                f"    {'' if reads else 'static '}__device__ __forceinline__ {kind} {name}({parameters})"
                f"{' const' if reads else ''} {{ {'return (' if expression else ''}"
            )
            text += [
                f'#line 1 "{name}"',
                line,
                f'#line {len(text) + 4} "variant"',
                "    ); }" if expression else "    ; }",
            ]
        return "\n".join([*text, "};", ""])


def _member(name, value):
    """A param as a member of the struct."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name) or name in TAKEN or name in SEES:
        raise ValueError(
            f"Variant: params must have names of C++ that are not taken ({', '.join(sorted(TAKEN))}), got {name!r}"
        )
    if isinstance(value, torch.Tensor):
        if value.dtype not in POINTERS:
            raise TypeError(f"Variant: {name} must be of one of {', '.join(map(str, POINTERS))}, got {value.dtype}")
        if not value.is_contiguous():
            raise ValueError(f"Variant: {name} must be contiguous, got strides {value.stride()}")
        return f"const {POINTERS[value.dtype]} *{name}"
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()}"
    if isinstance(value, int):
        if not -(1 << 31) < value < 1 << 31:
            raise ValueError(f"Variant: {name} must fit in 32 bits, got {value}")
        return f"static constexpr int {name} = {value}"
    if isinstance(value, float):
        if not abs(value) <= torch.finfo(torch.float32).max:
            raise ValueError(f"Variant: {name} must be finite as a float32, got {value}")
        return f"static constexpr float {name} = {value!r}f"
    raise TypeError(f"Variant: {name} must be a number or a tensor, got {type(value).__name__}")


@functools.lru_cache(maxsize=256)
def kernel(name, text, options):
    """decode.cu or merge.cu, with a variant's text in front of it."""
    source = f'{text}#line 1 "{name}.cu"\n#include "{name}.cu"\n'
    return cuda.compile(source, (*options, f"-I{HERE}"), f"{name} with a variant")[name]


def sliding_window(n):
    """A query sees the n newest tokens up to its own."""
    _expect_positive("sliding_window", "n", n, int)
    return Variant(keep="position - token < n", first_token="position - n + 1", params={"n": n})


def soft_cap(cap):
    """cap · tanh(score / cap)"""
    _expect_positive("soft_cap", "cap", cap, (int, float))
    return Variant(score="cap * tanhf(s / cap)", params={"cap": float(cap)})


def alibi(slopes):
    """score - slope · distance, with a slope for each query head: float32 (n_heads,)."""
    if slopes.dtype != torch.float32 or slopes.ndim != 1:
        raise ValueError(f"alibi: slopes must be float32 (n_heads,), got {slopes.dtype} {tuple(slopes.shape)}")
    sizes = {"slopes": ("heads", lambda q: q.shape[-2])}
    return Variant(score="s - slopes[head] * (position - token)", params={"slopes": slopes}, _sizes=sizes)


def custom_mask(mask):
    """mask bool (n_requests, tokens): True where a token of a request is seen. What is behind its end is seen."""
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ValueError(f"custom_mask: mask must be bool (n_requests, tokens), got {mask.dtype} {tuple(mask.shape)}")
    keep = "token >= width || mask[(long long)request * width + token]"
    sizes = {"mask": ("requests", lambda q: q.shape[0])}
    return Variant(keep=keep, params={"mask": mask, "width": mask.shape[1]}, _sizes=sizes)


def rope(theta, head_dim, device):
    """Rotary positions: dimensions i and i + head_dim / 2 of a key or query at position p are turned by
    p · theta**(-2 i / head_dim). At position 100,000 the angle is exact to 1e-4."""
    _expect_positive("rope", "theta", theta, (int, float))
    if head_dim % 32:
        raise ValueError(f"rope: head_dim must be a multiple of 32, got {head_dim}")
    turns = [theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(head_dim // 2)]
    words = torch.tensor([round(turn * 2**32) for turn in turns], dtype=torch.int64).to(torch.int32)
    sizes, line = {"of_pair": ("pairs", lambda q: q.shape[-1] // 2)}, "(unsigned)token * (unsigned)of_pair[pair]"
    return Variant(turns=line, params={"of_pair": words.to(device)}, _sizes=sizes)


def _expect_positive(where, name, value, kinds):
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1 << 31:
        raise ValueError(f"{where}: {name} must be a positive number, got {value!r}")


__all__ = ["Variant", "alibi", "custom_mask", "rope", "sliding_window", "soft_cap"]
