"""Ours in the place of mamba_ssm's SSD, in its own layers on a card: the same outputs, states and decoded tokens."""

from types import SimpleNamespace

import pytest
import torch

from kernels.ssd import bench, mamba_chunk_scan_combined, peers, stack, which

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
LAYERS, SEQLEN = 3, 1000
ALLOWED = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # of three layers


@pytest.fixture(autouse=True)
def theirs(monkeypatch):
    """mamba_ssm's SSD, which here does not choose: to compile all choices takes minutes."""
    if peers.layer() is None:
        pytest.skip("mamba_ssm is not installed, into whose layers ours should drop")
    for _, kernel in peers._tuned():
        monkeypatch.setattr(kernel, "configs", kernel.configs[-1:])
    torch.manual_seed(13)
    return peers.mamba()


def off(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def ours(seen):
    """Ours, noting which rung takes each call."""

    def ssd(x, dt, A, B, C, chunk_size, **options):
        seen.append(which(x, dt, A, B, C, chunk_size=chunk_size, **options))
        return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **options)

    return ssd


def exact(x, dt, A, B, C, chunk_size, D=None, dt_bias=None, **_):
    """SSD in float64, in the dtype of x."""
    call = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}
    return bench.truth(call).to(x.dtype)


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_layers_of_the_2_7b_model(theirs, dtype):
    layers = stack.layers(LAYERS, dtype)
    hidden = torch.randn(1, SEQLEN, stack.MODEL, device="cuda").to(dtype)
    seen = []
    found, beside, wanted = (stack.forward(layers, hidden, ssd) for ssd in (ours(seen), theirs, exact))
    assert len(seen) == LAYERS and off(found, beside) < ALLOWED[dtype]
    assert off(found, wanted) < max(1.2 * off(beside, wanted), ALLOWED[dtype] / 2)
    if torch.cuda.get_device_capability() == (9, 0):
        assert set(seen) == {("fused", "")}


@pytest.mark.parametrize(
    "sizes",
    [dict(ngroups=4, d_state=64), dict(headdim=128, rmsnorm=False), dict(D_has_hdim=True, dt_limit=(0.01, 0.1))],
)
def test_other_layers(theirs, sizes):
    """Groups; z inside SSD, where there is no gated norm; D by column, limits. Two sequences at once."""
    layers = stack.layers(LAYERS, width=512, **sizes)
    hidden = torch.randn(2, 777, 512, device="cuda").half()
    found, beside = (stack.forward(layers, hidden, ssd) for ssd in (ours([]), theirs))
    assert off(found, beside) < ALLOWED[torch.float16]


def test_prefill_and_decode(theirs):
    """Final states fill mamba_ssm's cache, from which its own kernels decode."""
    layers = stack.layers(LAYERS)
    hidden = torch.randn(1, SEQLEN + 4, stack.MODEL, device="cuda").half()
    found = []
    for ssd in (mamba_chunk_scan_combined, theirs):
        cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        out = [stack.forward(layers, hidden[:, :SEQLEN], ssd, inference_params=cache)]
        states = [state.clone() for _, state in cache.key_value_memory_dict.values()]
        for at in range(SEQLEN, SEQLEN + 4):
            cache.seqlen_offset = at
            out.append(stack.forward(layers, hidden[:, at : at + 1], ssd, inference_params=cache))
        found.append((torch.cat(out, 1), torch.stack(states)))
    whole = stack.forward(layers, hidden, mamba_chunk_scan_combined)
    (y, states), (their_y, their_states) = found
    assert off(states, their_states) < 2e-3 and off(y, their_y) < ALLOWED[torch.float16]
    assert off(y[:, SEQLEN:], whole[:, SEQLEN:]) < ALLOWED[torch.float16]


@pytest.mark.parametrize("shape", [(70_000, 5376, 10_576, 5120), (197, 301, 310, 3)], ids=str)
def test_the_convolution_is_pytorchs(shape):
    """Of a projection's columns from some on; the last tokens of a long sequence."""
    seqlen, channels, columns, first = shape
    wide = torch.randn(2, seqlen, columns, device="cuda", dtype=torch.float16)
    x = wide[..., first : first + channels].transpose(1, 2)
    weight, bias = torch.randn(channels, 4, device="cuda").half(), torch.randn(channels, device="cuda").half()
    y, last = stack.conv1d(x, weight, bias), torch.nn.functional.pad(x, (3, 0))[..., -999:].float()
    whole = torch.nn.functional.conv1d(last, weight[:, None].float(), bias.float(), groups=channels)
    assert y.isfinite().all() and off(y[..., -whole.shape[2] :], torch.nn.functional.silu(whole)) < 1e-3
