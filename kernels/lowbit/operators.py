"""Rungs on a QuantizedWeight as operators of torch.library, which take its parts: two tensors, and how they lie.

torch.compile looks through the object: other tensors in the same places need no second compilation.
"""

import torch

from kernels.lowbit.arguments import expect_all, expect_weight
from kernels.lowbit.weights import QuantizedWeight
from lab.operators import operator

INPUTS = "Tensor packed, Tensor factors, int[] shape, int bits, int? group, Tensor x, {}bool pdl=False"


def _like_gemv(where, Wq, x):
    return expect_all(where, Wq, x)[1]


def of_weights(name, further="", look=_like_gemv, *, expect_fit=None, calls=None):
    """A decorator for rung(Wq, x, …, *, out=None, pdl=False): the operators `name` and `name_out`.

    further  the schema of what comes behind x: "Tensor residual, "
    look     look(where, Wq, x, …): checks them, and gives a tensor like the result
    expect_fit    expect_fit(Wq, x, pdl) raises for what the rung does not take, besides what none takes
    calls    its prepared calls, with options (shape, bits, group, pdl)
    """

    def decorate(rung):
        where = rung.__name__

        def call(packed, factors, shape, bits, group, *, out=None, **given):
            if calls is not None:  # what is prepared has been looked at
                options = torch.Size(shape), bits, group, given.get("pdl", False)
                if (done := calls.run(options, out, given["x"], packed, factors)) is not None:
                    return done
            return rung(QuantizedWeight.of_parts(packed, factors, shape, bits, group), out=out, **given)

        def fake(packed, factors, shape, bits, group, *, pdl=False, **given):
            Wq = QuantizedWeight.of_parts(packed, factors, shape, bits, group)
            result = look(where, Wq, **given)
            if expect_fit is not None:
                expect_fit(Wq, given["x"], pdl)
            return result

        def unpack(operators, Wq, x, *given, out=None, **options):
            expect_weight(where, Wq)
            return operators(Wq.packed, Wq.factors, Wq.shape, Wq.bits, Wq.group, x, *given, out=out, **options)

        return operator(name, INPUTS.format(further), fake=fake, unpack=unpack, call=call, watched="x")(rung)

    return decorate
