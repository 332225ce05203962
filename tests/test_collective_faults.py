"""Faults of exchanges between devices, planted in the kernels' own sources: the SIMT machine finds each, by its name
where it is one of order, by wrong sums where it is one of numbers, in one of eight series of turns."""

import functools
import re

import pytest
import torch

import simt
from kernels import collective
from kernels.collective import group as groups
from lab import cuda
from tests.test_collective import RUNGS, bits, expect_sum, messages


def planted(monkeypatch, *changes):
    """Kernels of this folder with these texts replaced, each of which must be there."""
    left = {old for old, _ in changes}

    def module(name, dtype, devices, blocks, *more):
        source = inlined(groups.HERE / f"{name}.cu")
        for old, new in changes:
            if old in source:
                left.discard(old)
            source = source.replace(old, new)
        options = f"-DDTYPE={groups.DTYPES[dtype]}", f"-DDEVICES={devices}", f"-DBLOCKS={blocks}", *more
        return cuda.compile(source, options, f"{name}.cu")

    monkeypatch.setattr("kernels.collective.launches.module", functools.cache(module))
    monkeypatch.setattr("kernels.collective.fused.module", functools.cache(module))
    return left


def inlined(path, seen=None):
    """A source with its own headers in place, so that a test may change them."""
    seen = set() if seen is None else seen
    if path in seen:
        return ""
    seen.add(path)

    def header(found):
        return inlined((path.parent / found[1]).resolve(), seen)

    return re.sub(r'#include "([^"]+)"', header, path.read_text().replace("#pragma once", ""))


def exchanges(rung, turns, count=4, n=300):
    """Several messages of two devices in one run, each twice; are all sums right, and then doubled?"""
    group = collective.Group(["cpu"] * 2, races=True)
    group.devices.turns, group.limit = turns, 150
    tensors = [messages(2, n, torch.bfloat16, e) for e in range(count)]
    sent = [[x.clone() for x in pair] for pair in tensors]

    def step():
        for pair in tensors:
            RUNGS[rung](pair, group=group)
            RUNGS["direct" if rung == "two_shot" else rung](pair, group=group)  # which reads what the first one left

    group.devices.graph(step).replay()
    group.check("exchanges")
    for pair, was in zip(tensors, sent):
        expect_sum([x / 2 for x in pair], was)


SCOPE = 'asm volatile("st.release.sys.global.u32 [%0], %1;"', 'asm volatile("st.release.gpu.global.u32 [%0], %1;"'
RELAXED = 'asm volatile("st.release.sys.global.u32 [%0], %1;"', 'asm volatile("st.relaxed.sys.global.u32 [%0], %1;"'
FAULTS = {
    "no end barrier": (
        "pull", simt.RaceError, "a barrier of both at the end",
        ("    if (come) come = barrier<1>(all_flags, flags, now.number, rank, limit, told);\n", ""),
    ),
    "no end barrier, two shots": (
        "two_shot", (simt.RaceError, AssertionError), "",
        ("    if (come) come = barrier<1>(all_flags, flags, now.number, rank, limit, told);\n", ""),
    ),
    "one buffer": ("pull_once", simt.RaceError, "a barrier of both at the end", ("now.number % 2 * room", "0")),
    "no first barrier": (
        "pull_once", simt.RaceError, "buffer", ("barrier<0>(all_flags, flags, now.number, rank, limit, told)", "true"),
    ),
    "scope of one device": ("pull_once", simt.ScopeFault, "takes the scope .sys", SCOPE),
    "a relaxed flag": ("two_shot", simt.RaceError, "no release covers it", RELAXED),
    "no barrier of the block": (
        "pull", simt.RaceError, "",
        ("    const int r = threadIdx.x;\n    __syncthreads();", "    const int r = threadIdx.x;"),
    ),
    "any flag": (
        "ll",
        AssertionError,
        "",
        ("(unsigned)(pair.x >> 32) == number && (unsigned)(pair.y >> 32) == number", "pair.x >> 32 != 0"),
    ),
    "words not put back": (
        "sentinel", AssertionError, "",
        ("    if (come) send(from, make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET));\n", ""),
    ),
    "one box": ("direct", (AssertionError, collective.PeerTimeout), "", ("(long long)(number % 2)", "0ll")),
    "a box for all": ("ll", (AssertionError, collective.PeerTimeout), "", ("(long long)(number % 2)", "0ll")),
    "numbers that stand still": ("ll", AssertionError, "", ("make_uint2(number, any)", "make_uint2(number - 1, any)")),
    "own zeros as they are": (
        "direct", AssertionError, "", ("words[r] = own;", "words[r] = r == rank ? message.load(k) : own;"),
    ),
    "order of arrival": (
        "pull_once", AssertionError, "",
        ("__ldcg((const uint4 *)buffers.of[r]", "__ldcg((const uint4 *)buffers.of[(r + rank) % DEVICES]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(monkeypatch, fault):
    rung, error, words, change = FAULTS[fault]
    left = planted(monkeypatch, change)
    found = []
    if fault == "own zeros as they are":
        zeros, mixed = [-0.0, -0.0] * 8, [-0.0, 5.0] * 8
        got = RUNGS[rung]([torch.tensor(zeros, dtype=torch.bfloat16), torch.tensor(mixed, dtype=torch.bfloat16)])
        assert not torch.equal(bits(got[0]), bits(got[1])) and not left
        return
    if fault == "order of arrival":  # of three numbers: two have one sum in any order
        x = [torch.full((64,), v) for v in (2.0**24, 1.0, 1.0)]
        got = RUNGS[rung](x, group=collective.Group(["cpu"] * 3))
        assert not torch.equal(got[0], got[1]) and not left
        return
    for turns in range(8):
        try:
            exchanges(rung, turns)
        except error as e:
            assert re.search(words, str(e))
            found.append(turns)
            break
    assert not left, "the text to replace is no longer there"
    assert found
    monkeypatch.undo()
    exchanges(rung, found[0])
