"""Whole systems from the course's kernels: a model from a folder, its steps, and text.

    model = models.load(folder)
    model.logits(tokens)                             (len(tokens), vocab) float32
    for token in model.generate(tokens, 100): ...    token ids
    models.load(folder, gpus=2)                      the same over two cards, or more

A file here puts kernels together and keeps what they need; what computes belongs to kernels/, and what is true to ref/.
In slim/: what the libraries of a whole environment carry for cards, and copies without the rest.
"""

from models.llm import load

__all__ = ["load"]
