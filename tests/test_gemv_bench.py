"""The benches of chapters 04 and 05 on a made-up card: each call of a row reads weights of its own."""

import functools
import sys
from types import SimpleNamespace

import made_up_card
import pytest
import torch

from kernels import gemv
from kernels.fusion import bench as fusion_bench
from kernels.gemv import bench
from lab.check import Verdict

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")


def weights(call):
    """Addresses of the matrices that a call is given, itself or through an object."""
    found = []
    while isinstance(call, functools.partial):
        found += call.args
        call = call.func
    found += [tensor for it in [*found, getattr(call, "__self__", None)] for tensor in vars_of(it)]
    return {t.data_ptr() for t in found if isinstance(t, torch.Tensor) and t.ndim == 2 and t.numel() > 1000}


def vars_of(it):
    return [] if it is None or isinstance(it, torch.Tensor) else list(getattr(it, "__dict__", {}).values())


def cold(calls):
    """Are there several calls, none of which reads a matrix that another one reads?"""
    read = [weights(call) for call in calls]
    return len(calls) > 1 and all(read) and len(set().union(*read)) == sum(map(len, read))


def test_the_ladder_of_gemv_reads_cold_weights(monkeypatch):
    card = made_up_card.put_in(monkeypatch)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "_check", lambda *args: Verdict(shapes=1))
    monkeypatch.setattr(bench, "_ways", lambda *args: [])
    ladder = bench._ladder("fp16", torch.float16, (24, 128), 0.1)
    names = [figure.name for figure in ladder.figures]
    ours = [*(r.title for r in bench.RUNGS), "rows share x, PDL"]  # so small a matrix is not for the ring
    assert names == [*ours, "cuBLAS: torch.mv", card.timed[-1]]
    for name in names[:-1]:  # the last only reads: its calls are made up
        assert cold(card.calls[name]), name


def test_the_ladder_of_unaligned_rows_has_both_ways(monkeypatch):
    card = made_up_card.put_in(monkeypatch)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "_check", lambda *args: Verdict(shapes=1))
    monkeypatch.setattr(bench, "_ways", lambda *args: [])
    ladder = bench._ladder("fp16", torch.float16, (24, 1031), 0.1)
    names = [figure.name for figure in ladder.figures]
    ways = ["rows share x", "words by address", "rows share x, PDL", "words by address, PDL"]
    assert names == [*(r.title for r in bench.RUNGS[:-1]), *ways, "cuBLAS: torch.mv", card.timed[-1]]
    called = {title: bench_function(card.calls[title][0]) for title in ways}
    assert called["rows share x"] is gemv.rows and called["words by address"] is gemv.gemv
    for name in names[:-1]:
        assert cold(card.calls[name]), name


def bench_function(call):
    """What a call of the ladder runs in the end."""
    return call.func.__defaults__[0]


def test_which_rungs_are_measured(monkeypatch):
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    dependent = [rung.title for rung in bench.rungs(torch.bfloat16, (4096, 4096))[len(bench.RUNGS) :]]
    assert dependent == ["rows share x, PDL", "ring of weights, PDL", "ring, tensor cores, PDL"]
    # where groups have two rows alone, gemv is the rung before, and stands there once
    assert [rung.title for rung in bench.rungs(torch.bfloat16, (4096, 14336))[len(bench.RUNGS) :]] == dependent[:2]
    assert [rung.name for rung in bench.rungs(torch.float32, (4096, 4096))] == [*(r.name for r in bench.RUNGS), "rows"]


def test_the_ladder_of_the_layer_reads_cold_weights(monkeypatch):
    card = made_up_card.put_in(monkeypatch)
    monkeypatch.setattr(fusion_bench, "DEVICE", "cpu")
    monkeypatch.setattr(fusion_bench, "MISTRAL_7B", SimpleNamespace(hidden=64, n_kv_heads=1, head_dim=32, ffn=136))
    monkeypatch.setattr(fusion_bench, "_ways", lambda *args: [])
    monkeypatch.setattr(fusion_bench, "_error", lambda *args: 0.0)  # eager is off by more on a CPU
    monkeypatch.setattr(fusion_bench, "_truth", lambda *args: None)
    ladder = fusion_bench._ladder("fp16", torch.float16, False, 0.1)
    assert [figure.name for figure in ladder.figures] == card.timed and len(card.timed) == 6
    for name in card.timed:
        if "joined" not in name:
            assert cold(card.calls[name]), name
