"""Variants of paged attention on a card: each against its reference, plain, dependent, invariant, and in a graph."""

import pytest
import torch
from guarded_tensors import fences_stand
from paged_problems import ALLOWED, Problem
from paged_variants import VARIANTS, reference

from kernels import paged

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("what", VARIANTS)
def test_right(what):
    for n, (heads, head_dim, page, new) in enumerate(
        [((32, 8), 128, 16, None), ((28, 4), 64, 4, 3), ((16, 1), 128, 64, 8)]
    ):
        dtype = list(ALLOWED)[n % 2]
        p = Problem([0, 1, 17, 1009, 3001, 640], page, *heads, head_dim, new=new, dtype=dtype, device="cuda")
        ours, theirs = VARIANTS[what](p)
        wanted, slots = reference(p, theirs), p.slots
        run = paged.append_attention if new else paged.decode

        def right(p=p, wanted=wanted):
            error = float((p.out.double() - wanted).norm() / wanted.norm())
            assert error <= 2 * ALLOWED[p.out.dtype] and fences_stand(p.out), error

        for how in ({}, {"pdl": True}, {"invariant": True}):
            run(p.q, p.cache, slots, out=p.out.fill_(torch.nan), variant=ours, **how)
            right()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(p.q, p.cache, slots, out=p.out, variant=ours)
        p.out.fill_(torch.nan)
        graph.replay()
        right()
