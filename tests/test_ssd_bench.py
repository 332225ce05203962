"""The bench of SSD, on a made-up card: what is timed was right, before and after, and the peer is called right."""

import functools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_attention_bench import card as card
from test_ssd_five import recurrence

from kernels.bench import GPU_TOPICS
from kernels.ssd import bench, peers
from kernels.ssd.bench import Entry, Shape
from kernels.ssd.five import SOURCES, five, least, work

HERE = torch.cuda.is_available() and torch.version.cuda is not None
SMALL = Shape(nheads=2, headdim=16, dstate=16)


@pytest.fixture
def small(card, monkeypatch):
    """The made-up card, a small layer, one rung and no peer."""
    monkeypatch.setattr(bench, "HOSTILE", [(37, 2, 2, 16, 1, 16)])
    monkeypatch.setattr(bench, "Shape", lambda: SMALL)  # so that it takes all rungs
    monkeypatch.setattr(bench, "RUNGS", [Entry("five", functools.partial(five, chunk_size=16), SOURCES)])
    monkeypatch.setattr(bench, "copies", lambda call: [call, dict(call)])
    monkeypatch.setattr(peers, "_module", lambda: None)
    bench.checked.cache_clear()
    return card


@pytest.mark.skipif(HERE, reason="there is a GPU")
def test_without_a_gpu_they_say_so():
    with pytest.raises(RuntimeError, match="the SSD ladders needs? an NVIDIA GPU"):
        bench.ladders()
    assert "ssd" in GPU_TOPICS


def test_truth_is_the_recurrence(card):
    for slow in (False, True):
        call = bench.inputs(100, 2, 4, 8, 2, 16, slow=slow)
        wanted, _ = recurrence(**call)
        np.testing.assert_allclose(bench.truth(call, 32).numpy(), wanted.numpy(), rtol=1e-9, atol=1e-9)


def test_inputs_decay_as_they_say(card):
    call = bench.inputs(10, nheads=400, headdim=1, dstate=1)
    steps = torch.nn.functional.softplus(call["dt_bias"])
    assert (
        1e-3 * 0.99 < steps.min() < 2e-3
        and 0.05 < steps.max() < 0.101
        and -16 < call["A"].min() < -15 < call["A"].max()
    )
    assert -0.1 <= bench.inputs(1, nheads=400, slow=True)["A"].min() < bench.inputs(1, slow=True)["A"].max() <= -0.01


def test_copies_are_cold(card, monkeypatch):
    monkeypatch.setattr(bench.cuda_timing, "COLD", 3 * 2 * 20 * 2 * 8)
    found = bench.copies(bench.inputs(20, 1, 2, 8, 1, 8))
    assert len(found) == 3 and len({each["x"].data_ptr() for each in found}) == 3
    assert all(torch.equal(each["B"], found[0]["B"]) for each in found)


def test_the_ladder_of_prefill(small, monkeypatch):
    ladder = bench._prefill("SSD prefill, tiny, 40", 40, SMALL, 0.1, slow=True)
    assert ladder.title == "SSD prefill, tiny, 40" and [f.name for f in ladder.figures] == ["five"] == small.timed
    moved, flops = least(1, 40, 2, 16, 1, 16)
    assert (ladder["five"].bytes, ladder["five"].flops) == (moved, flops)
    assert ladder["five"].checked == "right on 2 shapes" and ladder["five"].sources == SOURCES


def test_a_rung_that_is_wrong_is_not_timed(small, monkeypatch):
    def forgetful(x, dt, A, B, C, *, out=None, **options):
        y = five(x, dt, A, B, C, chunk_size=16, **options)
        if x.shape[1] == 40:  # lucky on the hostile shape
            y[:, 32:] = 0
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(bench, "RUNGS", [Entry("forgetful", forgetful, SOURCES)])
    with pytest.raises(ValueError, match="forgetful is not right, so it is not timed"):
        bench._prefill("SSD prefill, tiny, 40", 40, SMALL, 0.1)
    monkeypatch.setattr(bench, "HOSTILE", [(40, 1, 2, 16, 1, 16)])
    bench.checked.cache_clear()
    assert not bench.checked(forgetful) and small.timed == []


def test_the_ladder_of_steps(small, monkeypatch):
    monkeypatch.setattr(bench, "inputs", functools.partial(bench.inputs, **SMALL._asdict()))
    ladder = bench._steps(40, 16, 0.1)
    assert ladder.title == "SSD steps, 2.7B, 40, chunk 16"
    predicted = work(1, 40, 2, 16, 1, 16, 16)
    assert {f.name: (f.bytes, f.flops) for f in ladder.figures} == predicted


def test_titles_differ():
    titles = [bench.short(n) for n in bench.LENGTHS] + [name for name in bench.OTHERS]
    assert len(set(titles)) == len(titles) and titles[0] == "1K" and "256K" in titles


# The peer


def test_mamba_ssm_that_is_not_installed_is_named_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    peers._module.cache_clear()
    assert peers.mamba() is None and peers.mamba() is None
    assert capsys.readouterr().out.count("mamba_ssm cannot be imported (") == 1
    peers._module.cache_clear()


def test_mamba_ssm_is_imported_without_its_extension(monkeypatch, tmp_path):
    """Its __init__ fails where the extension is not built; the module with the kernels does not need it."""
    home = tmp_path / "mamba_ssm" / "ops" / "triton"
    home.mkdir(parents=True)
    for folder in (home, home.parent):
        (folder / "__init__.py").touch()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda_that_is_not_there")
    (home / "ssd_combined.py").write_text(
        "from mamba_ssm.ops.triton.ssd_bmm import kernel\nmamba_chunk_scan_combined = 7\n"
    )
    (home / "ssd_bmm.py").write_text(
        "from types import SimpleNamespace\n"
        "kernel = _bmm_chunk_fwd_kernel = SimpleNamespace(configs=[1, 2], cache={3: 4})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    peers._module.cache_clear()
    try:
        assert peers.mamba() == 7
        assert {name for name, _ in peers._tuned()} == {"kernel", "_bmm_chunk_fwd_kernel"}
        peers.tune_anew()
        assert sys.modules["mamba_ssm.ops.triton.ssd_bmm"].kernel.cache == {}
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
        peers._module.cache_clear()


def test_all_is_compiled_ahead(card, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "_apart", lambda *job: asked.append(job))
    monkeypatch.setattr(peers, "_module", lambda: SimpleNamespace(mamba_chunk_scan_combined=print))
    bench.compile_ahead()
    shapes = {(1, 80, 64, 1, 128), (1, 80, 64, 1, 64), (1, 80, 128, 1, 128)}
    assert {job[1:6] for job in asked} == shapes and len(asked) == len(set(asked))
    everywhere = sum(entry.lengths is None for entry in bench.RUNGS)
    assert len(asked) == len(bench.RUNGS) + 2 * everywhere + 3 * 2 * 4


def test_a_job_compiles_one_rung(small, monkeypatch):
    monkeypatch.setattr(bench, "WARM", 20)
    seen = []
    monkeypatch.setattr(bench, "RUNGS", [Entry("a", lambda **call: seen.append(call["x"].shape), ())])
    bench._compile("rung", *SMALL, 0)
    assert seen == [(1, 20, 2, 16)]


def test_a_job_compiles_a_part_of_mamba_ssm(monkeypatch):
    kernels = {name: SimpleNamespace(configs=[1, 2, 3], cache={}) for name in (*peers.PARTS, "_state_passing")}
    monkeypatch.setattr(peers, "_tuned", lambda: kernels.items())
    monkeypatch.setattr(peers, "_module", lambda: SimpleNamespace(mamba_chunk_scan_combined=lambda **call: None))
    peers.compile_part({"x": 1}, 64, 1)
    assert [len(kernel.configs) for kernel in kernels.values()] == [1, 3, 1, 1]


def test_mamba_ssm_gets_our_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(
        peers, "_module", lambda: SimpleNamespace(mamba_chunk_scan_combined=lambda **call: seen.append(call))
    )
    (call,) = peers.calls([{"x": 1, "dt_softplus": True}], 128)
    call()
    assert seen == [{"x": 1, "dt_softplus": True, "chunk_size": 128}]
