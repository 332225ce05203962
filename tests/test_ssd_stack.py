"""The stack of layers around SSD, without a card: its convolution, what it must do, and that it says what it lacks."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_attention_bench import card as card

from kernels.ssd import peers, stack
from kernels.ssd.five import least


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 37, 129), (1, 197, 5), (1, 3, 300)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution(shape, bias):
    batch, seqlen, channels = shape
    wide = torch.randn(batch, seqlen, channels + 7)  # a view of one projection
    x, weight = wide[..., 3 : 3 + channels].transpose(1, 2), torch.randn(channels, 4)
    bias = torch.randn(channels) if bias else None
    y = stack.conv1d(x, weight, bias)
    whole = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=3, groups=channels)[..., :seqlen]
    assert y.shape == x.shape and y.stride(1) == 1
    torch.testing.assert_close(y, torch.nn.functional.silu(whole), rtol=1e-5, atol=1e-5)


def test_a_convolution_that_it_does_not_do():
    x, weight = torch.randn(1, 9, 8).transpose(1, 2), torch.randn(8, 4)
    with pytest.raises(ValueError, match="channels side by side"):
        stack.conv1d(x.contiguous(), weight)
    with pytest.raises(NotImplementedError, match="seq_idx"):
        stack.conv1d(x, weight, seq_idx=torch.zeros(1, 9))
    with pytest.raises(NotImplementedError, match=r"4 taps .* weight \(8, 3\)"):
        stack.conv1d(x, weight[:, :3])
    with pytest.raises(NotImplementedError, match="activation None"):
        stack.conv1d(x, weight, activation=None)


def test_work_is_mostly_products():
    """2.7e9 weights, all but the embedding's, are multiplied once for each token."""
    moved, flops = stack.work(8192)
    weights = 64 * 2560 * (2 * 5120 + 256 + 80 + 5120)
    assert 2.5e9 < weights < 2.7e9 and 1.02 < flops / (2 * 8192 * weights) < 1.06
    assert tuple(a - b for a, b in zip((moved, flops), stack.work(8192, ssd=False))) == tuple(
        64 * n for n in least(1, 8192, 80, 64, 1, 128)
    )
    assert stack.work(1000, batch=8)[1] == pytest.approx(stack.work(8000)[1], rel=1e-3)


@pytest.fixture
def made_up(card, monkeypatch):
    """Layers whose mixer does nothing but SSD, on a card that is this CPU."""
    module = ModuleType("mamba2")
    module.mamba_chunk_scan_combined, module.causal_conv1d_fn, module.seen = "theirs", None, []
    monkeypatch.setattr(peers, "layer", lambda: SimpleNamespace(mamba2=module))
    monkeypatch.setattr(
        peers, "mamba", lambda: lambda x, dt, A, B, C, chunk_size: module.seen.append(chunk_size) or 2 * x
    )
    monkeypatch.setattr(peers, "tune_anew", lambda: None)

    def layer(hidden, residual):
        residual = hidden if residual is None else residual + hidden
        return module.mamba_chunk_scan_combined(residual, 0, 0, 0, 0, chunk_size=256), residual

    monkeypatch.setattr(stack, "layers", lambda: [layer, layer])
    monkeypatch.setattr(stack, "mamba_chunk_scan_combined", lambda x, *_, **__: 2 * x)
    monkeypatch.setattr(stack, "LENGTHS", (40, 1024))
    monkeypatch.setattr(stack, "MODEL", 8)
    monkeypatch.setattr(stack.cuda_timing, "flops_probe", lambda: (lambda: None, 10**9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return module


def test_the_ladders(made_up):
    found = stack.ladders()
    assert [ladder.title for ladder in found] == [
        "Mamba-2 2.7B stack, prefill, 40",
        "Mamba-2 2.7B stack, prefill, 1K",
    ]
    names = ["mamba_ssm: five kernels", "ours: fused", "no SSD at all"]
    assert all([f.name for f in ladder.figures] == names for ladder in found)
    theirs, ours, without = found[0].figures
    assert (ours.bytes, ours.flops) == stack.work(40) and without.flops == stack.work(40, ssd=False)[1]
    assert "kernels/ssd/fused.cu" in ours.sources and ours.checked == "0.0e+00 from mamba_ssm's"
    assert made_up.mamba_chunk_scan_combined == "theirs" and made_up.causal_conv1d_fn is None


@pytest.mark.parametrize("wrong", [2.02, torch.nan])
def test_what_is_wrong_is_not_timed(made_up, monkeypatch, wrong):
    monkeypatch.setattr(stack, "mamba_chunk_scan_combined", lambda x, *_, **__: wrong * x)
    with pytest.raises(ValueError, match="prefill, 40: ours is off by .* from mamba_ssm's"):
        stack.ladders()


def test_mamba_ssm_has_its_faster_chunk(made_up, monkeypatch):
    monkeypatch.setattr(stack, "_seconds_of_few", lambda layers, hidden, chunk: chunk)
    ladder = stack._prefill(stack.layers(), 40)
    assert set(made_up.seen) == {128} and ladder.figures[0].checked == "chunk 128, the faster"


def test_gains():
    ladder = SimpleNamespace(figures=[SimpleNamespace(timing=SimpleNamespace(median=t)) for t in (3.0, 2.0, 1.5)])
    assert stack.gains(ladder) == (1.5, 2.0)


def test_long_forwards_are_timed_as_called(made_up, monkeypatch):
    monkeypatch.setattr(stack, "IN_A_GRAPH", 39)
    ladder = stack._prefill(stack.layers(), 40)
    assert all(f.called == f.timing for f in ladder.figures)


def test_without_mamba_ssm_there_is_no_ladder(card, monkeypatch):
    monkeypatch.setattr(peers, "_module", lambda: None)
    peers.layer.cache_clear()
    assert stack.layers() is None and stack.ladders() == []
    peers.layer.cache_clear()


def test_the_layer_of_mamba_ssm_is_imported_without_what_it_needs_to_load_models(monkeypatch, tmp_path):
    home = tmp_path / "mamba_ssm"
    for folder in (home, home / "modules", home / "ops", home / "ops" / "triton"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (home / "modules" / "mamba2.py").write_text("from huggingface_hub import PyTorchModelHubMixin as M\n")
    (home / "modules" / "block.py").touch()
    (home / "ops" / "triton" / "layer_norm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(peers, "_module", lambda: 7)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else found(name))
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    before = set(sys.modules)
    peers.layer.cache_clear()
    try:
        assert isinstance(peers.layer().mamba2.M, type) and peers.layer().block is not None
        assert "huggingface_hub" not in sys.modules
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("mamba_ssm"):
                del sys.modules[name]
        peers.layer.cache_clear()
