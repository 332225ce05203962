"""mamba_ssm's own layers around a token and around a prompt, of our weights, where it is installed.

Its compiled extensions (causal_conv1d, and Mamba-1's scan) need a build of their own: in the place of causal_conv1d
stand our conv1d and conv_step, which are no slower, and all else is its own: its norms, its state update, its scan in
five kernels, all in Triton, and torch.nn.functional.linear. Its names say so.
"""

import contextlib
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from kernels import mamba2
from kernels.ssd import peers

TOKEN = "mamba_ssm's layers, with our conv_step"
PROMPT = "mamba_ssm's layers, with our conv1d"


def layers(shape, weights):
    """mamba_ssm's blocks of these weights, which they share; None, with a sentence, where there is no mamba_ssm."""
    theirs = peers.layer()
    if theirs is None:
        return None
    sizes = dict(
        d_state=shape.dstate, headdim=shape.headdim, ngroups=shape.ngroups, expand=shape.d_inner // shape.hidden
    )
    kind = dict(device="meta", dtype=shape.dtype)

    def mixer(width):
        return theirs.mamba2.Mamba2(width, use_mem_eff_path=False, layer_idx=0, d_conv=4, **sizes, **kind)

    def norm(width):
        return theirs.layer_norm.RMSNorm(width, eps=shape.eps, **kind)

    blocks = []
    for number, layer in enumerate(weights.layers):
        block = theirs.block.Block(
            shape.hidden, mixer, torch.nn.Identity, norm_cls=norm, fused_add_norm=True, residual_in_fp32=True
        )
        block.mixer.layer_idx = number
        for owner, name, tensor in (
            (block.norm, "weight", layer.norm),
            (block.mixer.in_proj, "weight", layer.W_in),
            (block.mixer.conv1d, "weight", layer.conv_weight[:, None]),
            (block.mixer.conv1d, "bias", layer.conv_bias),
            (block.mixer, "dt_bias", layer.dt_bias),
            (block.mixer, "A_log", torch.log(-layer.A)),
            (block.mixer, "D", layer.D),
            (block.mixer.norm, "weight", layer.gated_norm),
            (block.mixer.out_proj, "weight", layer.W_out),
        ):
            setattr(owner, name, torch.nn.Parameter(tensor, requires_grad=False))
        blocks.append(block)
    return blocks


def _conv_step(xBC, state, weight, bias, activation):
    return mamba2.conv_step(state, xBC, weight, bias)


def _conv1d(x, weight, bias=None, seq_idx=None, activation="silu"):
    """As causal_conv1d_fn: x and the result (batch, channels, seqlen), channels side by side in memory."""
    return mamba2.conv1d(x.transpose(1, 2), weight, bias, seq_idx=seq_idx)[0].transpose(1, 2)


@contextlib.contextmanager
def in_place(ssd=None):
    """Our convolutions stand in mamba_ssm's layers, and this scan, if one is given."""
    module = peers.layer().mamba2
    names = "causal_conv1d_fn", "causal_conv1d_update", "mamba_chunk_scan_combined"
    before = [getattr(module, name) for name in names]
    for name, value in zip(names, (_conv1d, _conv_step, ssd or before[2])):
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before):
            setattr(module, name, value)


def _normed(shape, weights, hidden, residual):
    norm = peers.layer().layer_norm.layer_norm_fn
    return norm(hidden, weights.norm, None, residual=residual, eps=shape.eps, residual_in_fp32=True, is_rms_norm=True)


def token_call(shape, weights, state, token):
    """A call of one token, token (1,) int64, from this state, which it moves on: logits (1, vocab). None without
    mamba_ssm. What is computed anew in each of its steps but never changes, -exp(A_log), is its own."""
    blocks = layers(shape, weights)
    if blocks is None:
        return None
    states = {number: (state.conv[number], state.ssm[number]) for number in range(len(blocks))}
    params = SimpleNamespace(seqlen_offset=1, key_value_memory_dict=states, max_batch_size=1)

    @torch.inference_mode()
    def call():
        hidden, residual = F.embedding(token, weights.embedding)[None], None
        with in_place():
            for block in blocks:
                hidden, residual = block(hidden, residual, inference_params=params)
        return F.linear(_normed(shape, weights, hidden[0], residual[0]), weights.head)

    return call


def prompt_call(shape, weights, hidden, chunk):
    """A call of a whole prompt, hidden (1, seqlen, hidden) of the embedding: the last norm's result, like hidden."""
    blocks, scan = layers(shape, weights), peers.mamba()
    if blocks is None:
        return None

    def ssd(x, dt, A, B, C, chunk_size, **options):
        return scan(x, dt, A, B, C, chunk, **options)

    @torch.inference_mode()
    def call(count=None):
        x, residual = hidden, None
        with in_place(ssd):
            for block in blocks[:count]:
                x, residual = block(x, residual)
        return _normed(shape, weights, x[0], residual[0])

    return call
