"""Whole systems from the course's kernels: a model from a folder, its steps, and text.

    model = models.load(folder)
    model.logits(tokens)                             (len(tokens), vocab) float32
    for token in model.generate(tokens, 100): ...    token ids

A file here puts kernels together and keeps what they need; what computes belongs to kernels/, and what is true to ref/.
"""

import importlib

__all__ = ["load"]


def __getattr__(name):
    """`load`, and the room's modules, when they are first asked for: PyTorch takes two seconds to import, in which the
    command does other things (models.early)."""
    if name == "load":
        return importlib.import_module(f"{__name__}.llm").load
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
