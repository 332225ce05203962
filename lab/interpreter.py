"""Triton's interpreter beside Triton's compiler, in one process.

    with interpreter(kernel) as run:
        run[grid](*arguments)        # CPU tensors

Triton chooses between the two when a kernel is defined. Here a kernel that is compiled elsewhere is interpreted for
once. Interpreting changes Triton's language, and Triton puts back only a part of it: kernels that are compiled later
would fail. Here all of it is put back, whatever happens in between.
"""

import builtins
import contextlib
import dataclasses
import inspect
import sys
import threading

import triton.experimental.gluon.language  # noqa: F401  of which the interpreter would import a copy of what it changed
import triton.language as tl
from triton.runtime import interpreter as of_triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

LANGUAGE = threading.RLock()  # held while Triton's language is changed; hold it to compile, if threads may interpret
_interpreted = {}  # function -> the kernel for the interpreter


@contextlib.contextmanager
def interpreter(kernel):
    """The kernel as Triton's interpreter runs it, whether or not TRITON_INTERPRET was set when Triton was imported.

    What it calls is then interpreted as well: the functions of its own module and of those that it imports from, and
    those of Triton that are written in Triton (tl.max and others). `range` gets whole numbers: of Triton 3.6's scalars
    NumPy has made none since 2.4. Threads take turns.
    """
    with LANGUAGE, _language_kept(), _interpretable(kernel), _changed_once(), _shapes_once(), _any_precision():
        yield _for_interpreter(kernel)


@contextlib.contextmanager
def _language_kept():
    """What the modules of triton.language and their classes have now, they have again at the end.

    But for names that are new in a module: the interpreter's copies of Triton's functions look there for them.
    """
    spaces = [space for name, space in list(sys.modules.items()) if name.split(".")[:2] == ["triton", "language"]]
    classes = {value for space in spaces for value in vars(space).values() if isinstance(value, type)}
    spaces += [value for value in classes if value.__module__.startswith("triton.language")]
    before = [(space, dict(vars(space))) for space in spaces]
    try:
        yield
    finally:
        for space, had in before:
            for name, value in list(vars(space).items()):
                if name in had and value is not had[name]:
                    setattr(space, name, had[name])
                elif name not in had and (isinstance(space, type) or name == "range"):
                    delattr(space, name)


@contextlib.contextmanager
def _interpretable(kernel):
    own = _modules(kernel)
    kernels = *own, vars(tl), vars(tl.standard)
    before = [(space, name, value) for space in kernels for name, value in space.items() if _is_jit(value)]
    spaces = [(space, space.get("range")) for space in (*own, vars(of_triton))]  # tl.range asks for `range` there
    try:
        for space, name, value in before:
            if value is not kernel:
                space[name] = _for_interpreter(value)
        for space, _ in spaces:
            space["range"] = _range
        yield
    finally:
        for space, name, value in before:
            space[name] = value
        for space, had in spaces:
            if had is None:
                space.pop("range", None)
            else:
                space["range"] = had


@contextlib.contextmanager
def _changed_once():
    """Triton changes its language again at each call of one function by another, which takes a third of the time. Here
    that is left out where the language is changed already."""
    change = getattr(of_triton, "_patch_lang", None)
    if change is None:  # a newer Triton
        yield
        return

    def unless_it_is(function):
        langs = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        parts = [lang.load for lang in langs]
        parts += [tl.math.exp, tl.core.tensor.__add__, tl.core.tensor_descriptor_base.load]
        if not langs or any(map(tl.core.is_builtin, parts)):
            return change(function)
        return of_triton._LangPatchScope()  # nothing to undo

    of_triton._patch_lang = unless_it_is
    try:
        yield
    finally:
        of_triton._patch_lang = change


@contextlib.contextmanager
def _any_precision():
    """Triton's interpreter multiplies float32 as it is, whatever input_precision says; but it knows fewer names."""
    builder = of_triton.interpreter_builder
    before = builder.options
    names = before.allowed_dot_input_precisions
    builder.options = dataclasses.replace(before, allowed_dot_input_precisions=(*names, "bf16x3"))
    try:
        yield
    finally:
        builder.options = before


@contextlib.contextmanager
def _shapes_once():
    """Triton builds the shape of every tensor and of its type anew, of a dozen objects each, and a table of NumPy's
    types whenever it wants one: almost half of the time. Here tensors of one type and shape share what is the same.
    """
    block, tensor = tl.core.block_type, tl.core.tensor  # which _language_kept puts back
    make_block, make_tensor, numpy_type = block.__init__, tensor.__init__, getattr(of_triton, "_get_np_dtype", None)
    given = [list(inspect.signature(made).parameters) for made in (make_block, make_tensor)]
    if given != [["self", "element_ty", "shape"], ["self", "handle", "type"]]:  # a newer Triton
        yield
        return
    blocks, scalars, numpy_types = {}, {}, {}

    def block_init(self, element_ty, shape):
        key = type(element_ty), str(element_ty), *(s.value if isinstance(s, tl.constexpr) else s for s in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self) | {"of_tensors": {}}
        vars(self).update(blocks[key])

    def tensor_init(self, handle, type):
        known = vars(type).get("of_tensors")
        if known is None and type.__class__ is tl.dtype:
            known = scalars.setdefault(type.name, {})
        if not known:
            make_tensor(self, handle, type)
            if known is not None:
                known.update((name, value) for name, value in vars(self).items() if name not in ("handle", "type"))
        else:
            vars(self).update(known, handle=handle, type=type)

    def numpy_type_once(type):
        name = type.scalar.name  # a pointer's is one of its own
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    block.__init__, tensor.__init__ = block_init, tensor_init
    if numpy_type is not None:
        of_triton._get_np_dtype = numpy_type_once
    try:
        yield
    finally:
        if numpy_type is not None:
            of_triton._get_np_dtype = numpy_type


def _modules(kernel):
    """What is defined beside the kernel, and beside each kernel that stands there."""
    found, left = {}, [kernel]
    while left:
        function = left.pop().fn
        if id(function.__globals__) not in found and not function.__module__.startswith("triton."):
            found[id(function.__globals__)] = function.__globals__
            left += [value for value in function.__globals__.values() if _is_jit(value)]
    return list(found.values())


def _is_jit(value):
    return isinstance(value, JITFunction)


def _for_interpreter(function):
    if isinstance(function, InterpretedFunction):  # TRITON_INTERPRET was set
        return function
    if function.fn not in _interpreted:
        _interpreted[function.fn] = InterpretedFunction(function.fn)
    return _interpreted[function.fn]


def _range(*bounds, **_):
    return builtins.range(*(b.handle.data.item() if isinstance(b, tl.tensor) else int(b) for b in bounds))
