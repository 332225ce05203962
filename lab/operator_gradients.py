"""Gradients of the operators of lab.operators: through PyTorch's dispatcher, past it, or refused."""

from typing import NamedTuple

import torch
from torch.autograd import forward_ad


class Context(NamedTuple):
    """What a backward is given besides gradients."""

    saved_tensors: tuple  # tracked, then kept
    options: dict
    needs_input_grad: tuple


def refuse_tangents(name, values):
    """Raise where one of these is a tensor with a tangent, as torch.func.jvp hands over: it would be lost."""
    if forward_ad._current_level > -1 and any(
        isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values
    ):
        raise NotImplementedError(
            f"{name}: tangents, of forward-mode differentiation, are not computed; call it outside of "
            f"torch.func.jvp and torch.autograd.forward_ad, or on tensors without a tangent"
        )


def register_backward(library, name, names, backward, tracked, kept):
    """Give the operator of this name, with inputs of these names, a backward."""
    saved = [names.index(one) for one in (*tracked, *kept)]
    others = [index for index in range(len(names)) if index not in saved]

    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(inputs[index] for index in saved))
        ctx.options = {names[index]: inputs[index] for index in others}

    def all_of_them(ctx, *gradients):
        asks = ctx.needs_input_grad  # of the arguments up to the last that is not its default
        needs = tuple(index < len(asks) and asks[index] for index in saved)
        context = Context(ctx.saved_tensors, ctx.options, needs)
        found = dict(zip(tracked, backward(context, *gradients)))
        return tuple(found.get(name) for name in names)

    torch.library.register_autograd(f"{library.ns}::{name}", all_of_them, setup_context=setup, lib=library)


class Learning:
    """An operator that has gradients, called past PyTorch's dispatcher, whose way through Python takes 140 µs."""

    def __init__(self, names, run, backward, tracked, kept):
        self.names, self.run, self.backward, self.saved, self.kept = names, run, backward, (*tracked, *kept), kept

    def __call__(self, args, kwargs):
        given = dict(zip(self.names, args)) | kwargs
        return _Node.apply(self, given, *(given.pop(name, None) for name in self.saved))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, learns, options, *tensors):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.learns, ctx.options = learns, options
        return learns.run(**dict(zip(learns.saved, tensors)), **options)

    @staticmethod
    def backward(ctx, *gradients):
        context = Context(ctx.saved_tensors, ctx.options, ctx.needs_input_grad[2:])
        return None, None, *ctx.learns.backward(context, *gradients), *(None for _ in ctx.learns.kept)


class _Untracked(torch.autograd.Function):
    """A node of the graph that says, if it is ever reached, that it has no gradients."""

    @staticmethod
    def forward(ctx, run, refusal, *inputs):
        ctx.refusal = refusal
        return run(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(ctx.refusal)


def refuse_backward(library, name, refusal):
    """What register_autograd would do for such a backward, in a tenth of the time, which every import takes."""
    run = getattr(getattr(torch.ops, library.ns), name).default

    def below(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)

    def called(*inputs):
        asked = torch.is_grad_enabled() and any(isinstance(i, torch.Tensor) and i.requires_grad for i in inputs)
        return _Untracked.apply(below, f"{name}: {refusal}", *inputs) if asked else below(*inputs)

    library.impl(name, called, "Autograd")
