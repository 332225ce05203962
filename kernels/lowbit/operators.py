"""Rungs on a QuantizedWeight as operators of torch.library, which take its parts: two tensors, and how they lie.

torch.compile looks through the object: other tensors in the same places need no second compilation.
"""

import torch

from kernels.lowbit.arguments import expect_all, expect_weight
from kernels.lowbit.weights import QuantizedWeight
from lab.operators import operator

INPUTS = "Tensor packed, Tensor factors, int[] shape, int bits, int? group, Tensor x, bool pdl=False"


def of_weights(name, expect_fit=None, calls=None):
    """A decorator for rung(Wq, x, *, out=None, pdl=False): the operators `name` and `name_out`. expect_fit(Wq, x, pdl)
    raises for what the rung does not take, besides what none takes. calls: its prepared calls, with options (shape,
    bits, group, pdl)."""

    def decorate(rung):
        where = rung.__name__

        def call(packed, factors, shape, bits, group, x, *, out=None, pdl=False):
            if calls is not None:  # what is prepared has been looked at
                done = calls.run((torch.Size(shape), bits, group, pdl), out, x, packed, factors)
                if done is not None:
                    return done
            return rung(QuantizedWeight.of_parts(packed, factors, shape, bits, group), x, out=out, pdl=pdl)

        def fake(packed, factors, shape, bits, group, x, *, pdl=False):
            Wq = QuantizedWeight.of_parts(packed, factors, shape, bits, group)
            _, out = expect_all(where, Wq, x)
            if expect_fit is not None:
                expect_fit(Wq, x, pdl)
            return out

        def unpack(operators, Wq, x, *, out=None, pdl=False):
            expect_weight(where, Wq)
            return operators(Wq.packed, Wq.factors, Wq.shape, Wq.bits, Wq.group, x, out=out, pdl=pdl)

        return operator(name, INPUTS, fake=fake, unpack=unpack, call=call, watched="x")(rung)

    return decorate
