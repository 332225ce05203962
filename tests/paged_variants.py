"""Variants of paged attention for tests: {name: make}; make(problem) returns ours and the reference's."""

import numpy as np
import torch

from kernels.paged import variants
from kernels.paged.variants import Variant
from ref import paged as ref


def window(p, n=20):
    return variants.sliding_window(n), ref.Variant(keep=lambda request, head, token, position: position - token < n)


def cap(p):
    return variants.soft_cap(0.8), ref.Variant(score=lambda s, *_: 0.8 * np.tanh(s / 0.8))


def slopes(p):
    of_head = 2.0 ** -torch.linspace(1, 5, p.q.shape[-2], device=p.q.device)
    theirs = of_head.cpu().double().numpy()
    return variants.alibi(of_head), ref.Variant(
        score=lambda s, request, head, token, position: s - theirs[head] * (position - token)
    )


def mask(p):
    width = max(p.cache.lengths(p.requests)) - 9  # what is behind it is seen
    drawn = np.random.default_rng(1).random((len(p.requests), width)) < 0.6
    drawn[0] = False
    ours = variants.custom_mask(torch.from_numpy(drawn).to(p.q.device))
    wide = np.pad(drawn, ((0, 0), (0, 10)), constant_values=True)
    return ours, ref.Variant(keep=lambda request, head, token, position: wide[request, np.minimum(token, width)])


def rope(p, theta=10_000.0):
    head_dim = p.q.shape[-1]
    ours = variants.rope(theta, head_dim, p.q.device)
    return ours, ref.Variant(angle=lambda token, pair: token * theta ** (-2 * pair / head_dim))


def all_at_once(p):
    """A learner's own: every second token in front of the last twelve, turned as it likes, its scores capped."""
    ours = Variant(
        score="if (s > top) return top; return s;", keep="position - token < 12 || token % 2 == head % 2",
        turns="token * (1u << 20) * (pair + 1)", params={"top": 0.5},
    )  # fmt: skip
    return ours, ref.Variant(
        lambda s, *_: np.minimum(s, 0.5),
        lambda request, head, token, position: (position - token < 12) | (token % 2 == head % 2),
        lambda token, pair: token * (pair + 1) * 2 * np.pi / 4096,
    )


VARIANTS = {"sliding window": window, "soft cap": cap, "ALiBi": slopes, "custom mask": mask, "RoPE": rope}
VARIANTS["all at once"] = all_at_once


def reference(p, variant):
    """What a variant must give for a Problem, in float64."""
    cache = ref.PagedCache(sum(len(said[0, 0]) for said in p.said) + 1, 1, *p.said[0].shape[3:])
    requests = [cache.new() for _ in p.said]
    for request, said in zip(requests, p.said):
        if said.shape[2]:
            cache.append([request], *said.cpu().double().numpy())
    run = ref.append_attention if p.q.ndim == 4 else ref.decode
    return torch.from_numpy(run(p.q.cpu().double().numpy(), cache, requests, variant=variant)).to(p.q.device)
