"""The kernels of this folder as operators of torch.library, which say what they write to: mamba2_conv1d and so on, and
mamba2_state_step_coded of a state's parts. torch.compile looks through a QuantizedState."""

import torch

from kernels.fusion.arguments import expect_eps
from kernels.mamba2 import convolution, operations, products, stepping
from kernels.mamba2.launches import HALVES
from kernels.mamba2.states import QuantizedState
from lab.operators import operator
from lab.tensors import expect, expect_first

TOKEN = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, "
    "bool dt_softplus=False, float[]? dt_limit=None, bool pdl=False"
)


def _fake_conv1d(xBC, weight, bias=None, initial_state=None, seq_idx=None, cu_seqlens=None, pdl=False):
    others = xBC, weight, bias, initial_state, seq_idx, cu_seqlens
    return convolution.expect_conv1d("conv1d", *others, memory=False)[:2]


def _conv1d(
    operators, xBC, weight, bias=None, *, initial_state=None, seq_idx=None, cu_seqlens=None, out=None, final_state=None,
    pdl=False,
):  # fmt: skip
    y, final = operators(xBC, weight, bias, initial_state, seq_idx, cu_seqlens, pdl, out=out)
    return y, final if final_state is None else final_state.copy_(final)


conv1d = operator(
    "mamba2_conv1d",
    "Tensor xBC, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, Tensor? seq_idx=None, "
    "Tensor? cu_seqlens=None, bool pdl=False",
    fake=_fake_conv1d, results="(Tensor, Tensor)", unpack=_conv1d,
)(convolution.conv1d)  # fmt: skip


def _fake_conv_step(conv_state, xBC, weight, bias=None, pdl=False):
    return convolution.expect_conv_step("conv_step", conv_state, xBC, weight, bias, memory=False)[0]


conv_step = operator(
    "mamba2_conv_step", "Tensor(s!) conv_state, Tensor xBC, Tensor weight, Tensor? bias=None, bool pdl=False",
    fake=_fake_conv_step,
)(convolution.conv_step)  # fmt: skip


def _fake_gated_norm(y, z, weight, eps=1e-5, ngroups=1, pdl=False):
    return operations.expect_gated_norm("gated_norm", y, z, weight, eps, ngroups, memory=False)


gated_norm = operator(
    "mamba2_gated_norm", "Tensor y, Tensor z, Tensor weight, float eps=1e-05, int ngroups=1, bool pdl=False",
    fake=_fake_gated_norm,
)(operations.gated_norm)  # fmt: skip


def _fake_add_norm(x, residual, weight, eps=1e-5, pdl=False):
    where = "add_norm"
    expect_first(where, "weight", weight, ("hidden",), HALVES)
    expect(where, "residual", residual, weight, ("tokens", len(weight)), (torch.float32, weight.dtype))
    if x is not None:
        expect(where, "x", x, weight, tuple(residual.shape))
    expect_eps(where, eps)
    return weight.new_empty(residual.shape)


add_norm = operator(
    "mamba2_add_norm", "Tensor? x, Tensor(r!) residual, Tensor weight, float eps=1e-05, bool pdl=False",
    fake=_fake_add_norm, watched="residual",
)(operations.add_norm)  # fmt: skip


def _fake_in(residual, norm_weight, W, eps=1e-5, bias=None, conv_state=None, conv_weight=None, conv_bias=None, inner=0,
             bulk=False, ahead=None, pdl=False):  # fmt: skip
    others = residual, norm_weight, W, bias, conv_weight, conv_bias
    products.expect_ahead("norm_in_proj", W, ahead)
    return products.expect_norm_in_proj("norm_in_proj", *others, eps, conv_state, inner, memory=False)[0]


norm_in_proj = operator(
    "mamba2_norm_in_proj",
    "Tensor residual, Tensor norm_weight, Tensor W, float eps=1e-05, Tensor? bias=None, Tensor(s!)? conv_state=None, "
    "Tensor? conv_weight=None, Tensor? conv_bias=None, int inner=0, bool bulk=False, Tensor? ahead=None, "
    "bool pdl=False",
    fake=_fake_in,
)(products.norm_in_proj)  # fmt: skip


def _written(
    operators, x, norm_weight, W, residual, eps=1e-5, *, bias=None, bulk=False, ahead=None, pdl=False
):  # fmt: skip
    operators(x, norm_weight, W, residual, eps, bias, bulk, ahead, pdl)
    return residual


def _fake_out(x, norm_weight, W, residual, eps=1e-5, bias=None, bulk=False, ahead=None, pdl=False):
    products.expect_ahead("norm_out_proj", W, ahead)
    products.expect_norm_out_proj("norm_out_proj", x, norm_weight, W, bias, residual, eps, memory=False)


def _call_out(**how):
    products.norm_out_proj(**how)


norm_out_proj = operator(
    "mamba2_norm_out_proj",
    "Tensor x, Tensor? norm_weight, Tensor W, Tensor(r!) residual, float eps=1e-05, Tensor? bias=None, "
    "bool bulk=False, Tensor? ahead=None, bool pdl=False",
    fake=_fake_out, results="()", unpack=_written, call=_call_out,
)(products.norm_out_proj)  # fmt: skip


def _fake_coded(
    codes, scale, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=None, pdl=False
):
    tensors = codes, scale, x, dt, A, B, C, D, z, dt_bias
    return stepping.expect_state_step(
        *tensors, stepping.NO_LIMIT if dt_limit is None else tuple(dt_limit), memory=False
    )[0]


def _fake_step(state, *args, **how):
    return _fake_coded(state, None, *args, **how)


def _call_step(state, dt_limit=None, **how):
    return stepping.state_step(state, **how, dt_limit=stepping.NO_LIMIT if dt_limit is None else tuple(dt_limit))


def _coded_step(
    codes, scale, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=None, out=None, pdl=False
):  # fmt: skip
    how = dict(D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, out=out, pdl=pdl)
    return _call_step(QuantizedState(codes, scale), x=x, dt=dt, A=A, B=B, C=C, **how)


_coded_step = operator(
    "mamba2_state_step_coded", f"Tensor(c!) codes, Tensor(s!) scale, {TOKEN}", fake=_fake_coded, watched="x"
)(_coded_step)  # fmt: skip


def _unpack(operators, state, x, dt, A, B, C, *, dt_limit=stepping.NO_LIMIT, **how):
    limit = None if dt_limit == stepping.NO_LIMIT else [float(n) for n in dt_limit]
    if isinstance(state, QuantizedState):
        return _coded_step(state.codes, state.scale, x, dt, A, B, C, dt_limit=limit, **how)
    return operators(state, x, dt, A, B, C, dt_limit=limit, **how)


state_step = operator(
    "mamba2_state_step", f"Tensor(s!) state, {TOKEN}", fake=_fake_step, unpack=_unpack, call=_call_step, watched="x"
)(stepping.state_step)  # fmt: skip
embed = operations.embed  # out= is all that it gives, in a type that is the caller's choice
