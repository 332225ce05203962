"""The bench of the SSD backwards, on a made-up card: what is timed was right, and mamba_ssm is called right."""

import sys
from types import SimpleNamespace

import pytest
import torch
from test_attention_bench import card as card

from kernels import benching
from kernels.bench import GPU_TOPICS
from kernels.ssd import peers as ssd_peers
from kernels.ssd_backward import bench, peers, plain
from kernels.ssd_backward.bench import Case, Entry
from kernels.ssd_backward.plain import SOURCES

HERE = torch.cuda.is_available() and torch.version.cuda is not None
SMALL = (1, 2, 16, 1, 16)
TINY = Case("fp16", 40)


def made_up_module(off=0.0, seen=None):
    """mamba_ssm's module as far as the peers ask it: our own rungs behind its signatures."""
    names = "D", "dt_bias", "dt_softplus"

    def forward(x, dt, A, B, C, chunk_size, **options):
        assert set(options) == set(names)
        return 2 * x, None, None  # as good as any: what comes of it is looked at for its place alone

    def backward(dy, x, dt, A, B, C, out, chunk_size, **options):
        assert set(options) == set(names)
        assert torch.equal(out, 2 * x)
        if seen is not None:
            seen.append(chunk_size)
        g = plain(dy, x, dt, A, B, C, **options)
        return g.x + off, g.dt, g.A, g.B, g.C, g.D, g.z, g.dt_bias, g.initial_states

    return SimpleNamespace(
        _mamba_chunk_scan_combined_fwd=forward,
        _mamba_chunk_scan_combined_bwd=backward,
        mamba_chunk_scan_combined=lambda: None,
    )


@pytest.fixture
def small(card, monkeypatch):
    """The made-up card, a small layer, one rung and no peer."""
    made = bench.prefill.inputs
    monkeypatch.setattr(bench.prefill, "Shape", lambda: SMALL)
    monkeypatch.setattr(bench.prefill, "inputs", lambda seqlen, **how: made(seqlen, *SMALL, **how))
    monkeypatch.setattr(bench, "forward", lambda x, dt, A, B, C, **options: x)
    monkeypatch.setattr(bench, "RUNGS", [Entry("plain", plain, SOURCES)])
    monkeypatch.setattr(bench, "COPIES", 2)
    monkeypatch.setattr(bench.cuda_timing, "COLD", 1 << 20)
    monkeypatch.setattr(ssd_peers, "_module", lambda: None)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return card


@pytest.mark.skipif(HERE, reason="there is a GPU")
def test_without_a_gpu_they_say_so():
    with pytest.raises(RuntimeError, match="the SSD backward ladders needs? an NVIDIA GPU"):
        bench.ladders()
    assert "ssd_backward" in GPU_TOPICS


def test_a_ladder_without_the_peer(small):
    ladder = bench.measure(TINY, 0.1)
    assert ladder.title == "SSD forward and backward, 2.7B, fp16, 40"
    assert small.timed == ["fused forward, plain backward"] and len(small.calls[small.timed[0]]) == 2
    figure = ladder.figures[0]
    assert (figure.bytes, figure.flops) == bench.least(40)
    assert set(SOURCES) < set(figure.sources) and "kernels/ssd/fused.cu" in figure.sources


def test_backward_alone_is_less(small):
    both, alone = bench.least(40), bench.least(40, both=False)
    assert alone[0] == 2 * 40 * (3 * 32 + 4 + 64) and alone[1] == 2 * 40 * 32 * (64 + 5 * 16)
    assert both[0] > alone[0] and both[1] > alone[1]
    ladder = bench.measure(TINY._replace(both=False), 0.1)
    assert ladder.title == "SSD backward, 2.7B, fp16, 40" and small.timed == ["plain"]


def test_mamba_ssm_beside_ours(small, monkeypatch):
    seen, tuned = [], []
    monkeypatch.setattr(ssd_peers, "_module", lambda: made_up_module(seen=seen))
    monkeypatch.setattr(peers, "tune_quickly", lambda anew: tuned.append(anew))
    ladder = bench.measure(TINY, 0.1)
    assert len(ladder.figures) == 2 and ladder.figures[1].name.startswith("mamba_ssm: chunk ")
    assert set(seen) == {128, 256} and tuned == [True]
    bench.measure(TINY._replace(both=False), 0.1)
    assert tuned == [True, False]


def test_a_peer_that_is_wrong_is_left_out(small, monkeypatch, capsys):
    monkeypatch.setattr(ssd_peers, "_module", lambda: made_up_module(off=1.0))
    ladder = bench.measure(TINY, 0.1)
    assert [figure.name for figure in ladder.figures] == ["fused forward, plain backward"]
    assert "mamba_ssm: chunk 256 is left out" in capsys.readouterr().out


def test_a_rung_that_is_wrong_is_not_timed(small, monkeypatch):
    def wrong(*tensors, **call):
        found = plain(*tensors, **call)
        return found._replace(x=found.x * 1.01)

    monkeypatch.setattr(bench, "RUNGS", [Entry("wrong", wrong, SOURCES)])
    with pytest.raises(ValueError, match="wrong backward is not right, so it is not timed"):
        bench.measure(TINY, 0.1)


def test_the_tables(small, monkeypatch):
    seen = []
    monkeypatch.setattr(ssd_peers, "_module", lambda: made_up_module(seen=seen))
    monkeypatch.setattr(bench, "LENGTHS", (40, 80))
    monkeypatch.setattr(bench, "ACCURATE", 40)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7e6)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10e6)
    monkeypatch.setattr(bench, "DTYPES", {"bf16": torch.bfloat16, "fp16": torch.float16})
    memory, *errors = bench.tables()
    assert set(memory.rows) == {"fused forward, plain backward", "mamba_ssm, chunk 256", "mamba_ssm, chunk 128"}
    assert all(row == {"40": 3, "80": 3} for row in memory.rows.values())
    assert len(errors) == 2
    for table, most in zip(errors, (4e-3, 5e-4)):
        assert set(table.rows) == {"plain", "mamba_ssm", "plain, slow decay", "mamba_ssm, slow decay"}
        for row in table.rows.values():
            assert row.pop("the same bits") == "yes"
            assert set(row) == {"x", "dt", "A", "B", "C", "D", "dt_bias"} and max(row.values()) < most


def test_what_the_peers_kernels_are_tuned_to(monkeypatch):
    kernel = SimpleNamespace(cache={"a": 1}, configs=[1, 2, 3])
    other = SimpleNamespace(cache={}, configs=[4, 5])
    for name in peers.MODULES:
        monkeypatch.setitem(sys.modules, f"mamba_ssm.ops.triton.{name}", SimpleNamespace(_bmm_chunk_bwd_kernel=kernel))
    combined = SimpleNamespace(_bmm_chunk_bwd_kernel=kernel, _rest_kernel=other)
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", combined)
    assert [name for name, _ in peers._tuned()] == ["_bmm_chunk_bwd_kernel", "_rest_kernel"]
    peers.tune_quickly()
    assert kernel.cache == {"a": 1} and callable(kernel.do_bench)
    peers.tune_quickly(anew=True)
    assert kernel.cache == {}
    run = []
    monkeypatch.setattr(ssd_peers, "_module", lambda: None)
    monkeypatch.setattr(peers, "forward_and_backward", lambda call, chunk: lambda: run.append((call, chunk)))
    peers.compile_part("call", 256, peers.PARTS.index("_bmm_chunk_bwd_kernel"))
    assert run == [("call", 256)] and not hasattr(kernel, "run") and other.run("anything", grid=1) is None
    assert other.best_config == 5


def test_compiling_ahead_asks_for_all_parts(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "_apart", asked.append)
    monkeypatch.setattr(ssd_peers, "_module", made_up_module)
    bench.compile_ahead(["bf16"])
    assert {("peer", "bf16", part) for part in range(len(peers.PARTS))} < set(asked)
    assert ("ours", "bf16", 0) in asked and len(asked) == len(peers.PARTS) + 1
    asked.clear()
    monkeypatch.setattr(ssd_peers, "_module", lambda: None)
    bench.compile_ahead(["bf16", "fp16"])
    assert asked == [("ours", "bf16", 0), ("ours", "fp16", 0)]


def test_inputs_and_copies(small):
    call = bench.inputs(20, torch.float16)
    assert call["dy"].shape == call["x"].shape and call["dt_softplus"] is True
    every = bench.copies(call)
    assert len(every) == 2 and all(len({each[name].data_ptr() for each in every}) == 2 for name in ("dy", "x", "B"))
    assert benching.DEVICE == "cpu"
