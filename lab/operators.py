"""Functions of torch tensors as operators of torch.library, so that torch.compile(fullgraph=True) takes them.

    @operator("gemv", "Tensor W, Tensor x, bool pdl=False", fake=shape_of_gemv)
    def gemv(W, x, *, out=None, pdl=False): ...

The function stays what it was: called from Python it runs, at 0.1 µs more, with no dispatcher between. As the operators
torch.ops.matmul_to_mamba.gemv and, with out=, gemv_out it runs where something stands in for tensors or looks on:

    torch.compile, torch.export    which cannot look into a launch, and take an operator as it is
    tensors without memory         of FakeTensorMode and make_fx
    gradients                      where a backward is given, and a tensor asks for one while grad mode is on
    tangents                       which are refused in a sentence: derivatives go backwards alone

A fake says what comes back without looking into memory: dtype, device and shape. It makes the same checks, so that a
wrong tensor is named while a model is compiled. Without a backward, gradients are not tracked: an operator says so in a
NotImplementedError when one is asked for.
"""

import functools
import inspect
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from lab.operator_gradients import Learning, refuse_backward, refuse_tangents, register_backward
from lab.tensors import expect, expect_no_gradient

NAMESPACE = "matmul_to_mamba"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)  # kernels have looked at strides: keep them
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # all else is asked whether it has memory
REFUSAL = "gradients are not tracked; call it under torch.no_grad(), or on tensors that ask for none"
WRAPPER = """
def made(_call, _operators, _tracing, _forward, _plain, _stands_in, _grad_mode, _calls):
    def {name}({parameters}):
        if _tracing() or _forward._current_level > -1 or type({watched}) not in _plain and _stands_in({watched}):
            return _operators({arguments}){prepared}{gradients}
        return _call({arguments})
    return {name}
"""
PREPARED = """
        if (done := _calls.{ask}) is not None:
            return {result}"""
GRADIENTS = """
        try:
            if ({ask}){without_out} and _grad_mode():
                return _operators({arguments})
        except AttributeError:  # no tensor: the call says so
            pass"""


class Prepared(NamedTuple):
    """Prepared calls (lab.prepared.Calls); how the function asks them, as text: "run(..)" or "run_tracked(..)" of its
    arguments; what it returns of what is `done`; and what else the texts name."""

    calls: object
    ask: str
    result: str = "done"
    names: dict = {}  # noqa: RUF012


def operator(
    name, inputs, *, fake, backward=None, tracked=(), kept=(), refusal=REFUSAL, results="Tensor", unpack=None,
    call=None, watched=None, prepared=None,
):  # fmt: skip
    """A decorator: the function, and operators `name` and `name_out` that run it.

    inputs    the schema of its arguments without out, by the function's names; Tensor(a!) of what it writes to
    fake      as the function, without out and with stand-ins: checks them and returns tensors like the results
    backward  backward(context, gradient): gradients of the inputs in `tracked`. context.saved_tensors holds these, and
              those in `kept`; needs_input_grad says which of them ask; options has all other inputs by name. With
              several results: a gradient for each, None where the loss does not depend on it
    tracked   names of the tensors that may have gradients; with `unpack`, which then sees to out= itself
    kept      names of further tensors that backward reads, such as whole numbers
    refusal   without a backward: what is said, behind "name: ", when a gradient is asked for
    results   the schema of what comes back, y first; other than "Tensor" only with unpack
    unpack    unpack(operators, *args, **kwargs): for a function whose arguments or results are no operator's. It calls
              operators(..., out=...), and torch.compile looks through it
    call      call(...): what the operator runs, if its inputs are not the function's
    watched   the argument, a tensor, that shows whether others stand in for tensors; the first unless named
    prepared  Prepared: the prepared calls that the function asks first of all; asked here, they cost a call or two of
              Python less
    """

    def decorate(function):
        run = call or function
        has_out = "out" in inspect.signature(function).parameters
        space = getattr(torch.ops, NAMESPACE)
        if not hasattr(space, name):  # or another copy of the course has defined it: the same
            _register(name, inputs, results, run, fake, has_out)
            if backward is None:
                refuse_backward(_library(), name, refusal)
            else:
                register_backward(_library(), name, _names(inputs), backward, tracked, kept)
        plain, into = getattr(space, name).default, getattr(space, f"{name}_out").default if has_out else None
        learns = backward and Learning(_names(inputs), run, backward, tracked, kept)

        def operators(*args, out=None, **kwargs):
            if not is_dynamo_compiling():
                refuse_tangents(function.__name__, (*args, out, *kwargs.values()))
            if out is None:
                return learns(args, kwargs) if learns and not _looked_at(args[0]) else plain(*args, **kwargs)
            found = into(*args, **kwargs, out=out)
            return out if found is None else (out, *found)

        if unpack is not None:
            operators = functools.partial(unpack, operators)
        return _wrapped(function, operators, tracked, watched, prepared, unpack is None)

    return decorate


def _register(name, inputs, results, run, fake, has_out):
    """Define the operators, what they run, and what says which tensors come back."""
    library = _library()
    schemas = {name: f"({inputs}) -> {results}"}
    if has_out:
        rest = results.removeprefix("Tensor").removeprefix("(Tensor").lstrip(", ").rstrip(")")
        schemas[f"{name}_out"] = f"({inputs}, *, Tensor(out!) out) -> ({rest})"
    names, written = _names(inputs), _written(inputs)

    def by_name(function):
        """PyTorch hands values over by their places, which are the schema's."""
        return lambda *args, **kwargs: function(**dict(zip(names, args)), **kwargs)

    for called, schema in schemas.items():
        into = called != name
        library.define(f"{called}{schema}", tags=TAGS)
        runs = functools.partial(_run_into, run) if into else run
        runs = _telling(runs, written) if written else runs
        runs = _refusing_tangents(called, runs)
        library.impl(called, by_name(runs), "CompositeExplicitAutograd")
        looked = by_name(functools.partial(_look, fake, name if into else None))
        torch.library.register_fake(f"{NAMESPACE}::{called}", looked, lib=library)


def _names(inputs):
    return [argument.split("=")[0].split()[-1] for argument in inputs.split(", ")]


def _written(inputs):
    """The names of the arguments that are written to, `Tensor(a!) cache`."""
    return [name for name, argument in zip(_names(inputs), inputs.split(", ")) if "!" in argument.split()[0]]


@functools.cache
def _library():
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def _run_into(run, out, **how):
    found = run(**how, out=out)
    _tell(out)
    return None if found is out else found[1:]


def _telling(run, written):
    """run, which writes to these arguments, and says so."""

    def call(**how):
        found = run(**how)
        for name in written:
            _tell(how[name])
        return found

    return call


def _refusing_tangents(name, run):
    """run, for the operator of this name: below autograd a tensor still has the tangent that it came with."""

    def call(**how):
        refuse_tangents(name, how.values())
        return run(**how)

    return call


def _tell(tensor):
    """Say that a tensor was written to, or a backward would not know."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


class _WithoutMemory(TorchFunctionMode):
    """Where tensors are stand-ins: their addresses are 0, which no check minds."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return 0 if function is torch.Tensor.data_ptr else function(*args, **(kwargs or {}))


def _look(fake, into, out=None, **how):
    with _WithoutMemory():
        found = fake(**how)
        if into is None:
            return found
        like, *rest = found if isinstance(found, tuple) else (found,)
        expect(into, "out", out, like, tuple(like.shape), empty=True)
        expect_no_gradient(into, out)
        return tuple(rest) or None


# The function


def _wrapped(function, operators, tracked, watched, prepared=None, out_untracked=True):
    """The function, with a look at who calls: of its own signature, as *args and **kwargs would take 0.3 µs."""
    signature = inspect.signature(function)
    defaults, parameters, arguments, star = {}, [], [], False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:  # what trials choose: of the function itself, not of this one
            continue
        by_name = parameter.kind is parameter.KEYWORD_ONLY
        if by_name and not star:
            parameters.append("*")
            star = True
        if parameter.default is not parameter.empty:
            defaults[f"_default_{name}"] = parameter.default
            parameters.append(f"{name}=_default_{name}")
        else:
            parameters.append(name)
        arguments.append(f"{name}={name}" if by_name else name)
    arguments = ", ".join(arguments)
    optional = {name for name in tracked if signature.parameters[name].default is None}
    ask = " or ".join(
        (f"{name} is not None and " if name in optional else "") + f"{name}.requires_grad" for name in tracked
    )
    without_out = " and out is None" if out_untracked and "out" in signature.parameters else ""
    text = WRAPPER.format(
        name=function.__name__,
        parameters=", ".join(parameters),
        arguments=arguments,
        watched=watched or next(iter(signature.parameters)),
        prepared=PREPARED.format(ask=prepared.ask, result=prepared.result) if prepared else "",
        gradients=GRADIENTS.format(ask=ask, arguments=arguments, without_out=without_out) if tracked else "",
    )
    space = defaults | (prepared.names if prepared else {})  # no __name__: torch.compile would look for these there
    exec(compile(text, f"<operator of {function.__name__}>", "exec"), space)
    made = space["made"](
        function,
        operators,
        is_dynamo_compiling,
        forward_ad,
        PLAIN,
        _stands_in,
        torch.is_grad_enabled,
        prepared and prepared.calls,
    )
    return functools.update_wrapper(made, function)


def _looked_at(tensor):
    """Whether somebody traces, counts or transforms what is called, and so must see operators."""
    return (
        is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (type(tensor) not in PLAIN and _stands_in(tensor))
    )


def _stands_in(value):
    """Whether this is a tensor without memory, of a mode that traces."""
    return isinstance(value, torch.Tensor) and torch._C._dispatch_keys(value).has(torch._C.DispatchKey.Python)
