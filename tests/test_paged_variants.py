"""Variants of paged attention on the SIMT machine: each against its reference, what a window leaves unread, what a
mistake in a line would do, and an error that names the line."""

import functools

import numpy as np
import pytest
import torch
from guarded_tensors import fences_stand
from paged_problems import ALLOWED, Problem
from paged_variants import VARIANTS, reference

import simt
from kernels import paged
from kernels.paged import decoding, variants
from kernels.paged.variants import Variant
from ref import paged as ref

LENS = [33, 0, 1, 150, 64]


def call(p, variant, **how):
    run = paged.append_attention if p.q.ndim == 4 else paged.decode
    return run(p.q, p.cache, p.requests, out=p.out.fill_(torch.nan), variant=variant, **how)


def off(out, wanted):
    return float((out.double() - wanted).norm() / wanted.norm())


def close(p, out, theirs):
    wanted = reference(p, theirs)
    assert off(out, wanted) <= 2 * ALLOWED[out.dtype], off(out, wanted)  # turned keys are rounded once more
    assert (out[(wanted == 0).all(-1)] == 0).all() and fences_stand(p.out)


# lengths, page, heads, kv heads, head_dim, new tokens
SIZES = {
    "sliding window": (LENS, 16, 8, 2, 32, 3),
    "soft cap": (LENS, 4, 8, 2, 64, None),
    "ALiBi": (LENS, 16, 6, 2, 32, 2),
    "custom mask": (LENS, 8, 20, 1, 32, None),
    "RoPE": (LENS, 16, 8, 2, 64, 2),
    "all at once": (LENS, 32, 4, 4, 32, None),
}


@pytest.mark.parametrize("what", VARIANTS)
def test_right(what):
    *sizes, new = SIZES[what]
    p = Problem(*sizes, new=new, dtype=torch.bfloat16 if what == "RoPE" else torch.float16)
    ours, theirs = VARIANTS[what](p)
    close(p, call(p, ours), theirs)
    plain = reference(p, ref.Variant())
    assert off(p.out, plain) > 0.05  # else nothing was tested


def test_in_pieces_and_whoever_else_is_there():
    """More rows than decode.cu takes at once; and with a window, the same bits alone."""
    p = Problem([60, 19, 150], 16, 16, 2, 32, new=20)
    ours, theirs = VARIANTS["sliding window"](p)
    close(p, call(p, ours), theirs)
    p = Problem([300, 19, 150], 16, 8, 2, 32)
    ours = variants.sliding_window(100)
    found = call(p, ours, invariant=True).clone()
    for n, request in enumerate(p.requests):
        alone = paged.decode(p.q[n : n + 1], p.cache, [request], invariant=True, variant=ours)
        assert torch.equal(alone[0], found[n])


def test_what_no_query_sees_is_not_read():
    p = Problem([200, 7, 150], 16, 8, 2, 64, new=2)
    for name in ("k_pages", "v_pages"):
        for request, tokens in ((0, (200 - 2 - 30 + 1) // 16 * 16), (2, (150 - 2 - 30 + 1) // 16 * 16)):
            pages = p.cache.pool.pages[p.requests[request].slot][: tokens // 16]
            getattr(p.cache, name)[pages] = torch.nan
    ours = variants.sliding_window(30)
    _, theirs = VARIANTS["sliding window"](p, 30)
    for chosen in ({"shares": 3}, {"warps": 4, "side": 1, "shares": 5}):
        pool = p.cache.k_pages, p.cache.v_pages, p.cache.table, p.cache.lens
        decoding.launch(p.q, *pool, p.slots, 64**-0.5, p.out, 2, False, False, chosen=chosen, variant=ours,
                        check_races=True)  # fmt: skip
        close(p, p.out, theirs)


MISTAKES = {  # a line that is wrong, and whose it is
    "a token too many": ("sliding window", {"keep": "position - token <= n"}),
    "skips one that is seen": ("sliding window", {"first_token": "position - n + 17"}),
    "the mask of another request": ("custom mask", {"keep": "token >= width || mask[token]"}),
    "the angle of another pair": ("RoPE", {"turns": "(unsigned)token * (unsigned)of_pair[pair ^ 1]"}),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_would_be_seen(what):
    name, changed = MISTAKES[what]
    *sizes, new = SIZES[name]
    p = Problem(*sizes, new=new)
    ours, theirs = VARIANTS[name](p)
    wrong = Variant(**ours.lines | changed, params=ours.params)
    with pytest.raises((AssertionError, simt.SimtError)):
        close(p, call(p, wrong), theirs)


BAD = {  # what is made, the error, its words
    "no line": (lambda: Variant(), ValueError, "one of score, keep, first_token, turns must be given, got none"),
    "a line that is none": (lambda: Variant(score=abs), TypeError, r"score must be a str of CUDA C\+\+, got builtin"),
    "an empty line": (lambda: Variant(keep=" "), ValueError, "keep must not be empty"),
    "a name that is taken": (lambda: Variant(score="s", params={"head": 1}), ValueError, "not taken .*got 'head'"),
    "an infinite number": (lambda: Variant(score="s", params={"a": np.inf}), ValueError, "a must be finite as a float"),
    "infinite in 32 bits": (lambda: Variant(score="s", params={"a": 1e39}), ValueError, "a must be finite .*got 1e.39"),
    "a number too large": (lambda: Variant(score="s", params={"a": 1 << 40}), ValueError, "a must fit in 32 bits"),
    "a tensor of doubles": (
        lambda: Variant(score="s", params={"a": torch.ones(2).double()}),
        TypeError,
        "a must be of",
    ),
    "a list": (lambda: Variant(score="s", params={"a": [1]}), TypeError, "a must be a number or a tensor, got list"),
    "a window of none": (lambda: variants.sliding_window(0), ValueError, "n must be a positive number, got 0"),
    "slopes of 16 bits": (lambda: variants.alibi(torch.ones(8).half()), ValueError, "slopes must be float32"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_variant(what):
    make, kind, words = BAD[what]
    with pytest.raises(kind, match=words):
        make()


def test_nothing_is_launched_with_a_variant_that_does_not_suit():
    p = Problem([33, 17], 16, 8, 2, 48)
    decode = functools.partial(paged.decode, p.q, p.cache, p.requests, out=p.out)
    for variant, kind, words in (
        ("window", TypeError, "decode: variant must be a Variant, got str"),
        (variants.alibi(torch.ones(7)), ValueError, "decode: variant: slopes must be for 8 heads, like q, got 7"),
        (variants.custom_mask(torch.ones(3, 9) > 0), ValueError, "mask must be for 2 requests, like q, got 3"),
        (Variant(turns="token"), ValueError, "head_dim must be a multiple of 32 to be turned, got 48"),
        (Variant(score="s", params={"a": torch.ones(1, device="meta")}), ValueError, "a must be on cpu, like q"),
        (Variant(score="2 * s +\n t"), simt.CompileError, r'score:2: error: identifier "t" is undefined\n   t\n'),
        (Variant(keep="return toke;"), simt.CompileError, 'keep:1: error: identifier "toke" is undefined'),
    ):
        with pytest.raises(kind, match=words):
            decode(variant=variant)
    assert p.out.isnan().all() and fences_stand(p.out)
