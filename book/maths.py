"""Formulas as MathML, which browsers draw by themselves: no script, no network, and text that can be read aloud."""

import re

from latex2mathml.converter import convert

SMALL = {r"\tfrac": r"\frac", r"\dfrac": r"\frac", r"\big": "", r"\mathrel": ""}


def mathml(formula, display=False):
    """LaTeX -> a <math> element."""
    for name, other in SMALL.items():
        formula = re.sub(re.escape(name) + r"(?![a-zA-Z])", lambda _, other=other: other, formula)
    formula = re.sub(r"\\text\{[^{}]*\}", lambda found: found[0].replace(r"\_", "_"), formula)
    return convert(" ".join(formula.split()), display="block" if display else "inline")


def inline(translator, node):
    from docutils.nodes import SkipNode

    translator.body.append(mathml(node.astext()))
    raise SkipNode


def block(translator, node):
    from docutils.nodes import SkipNode

    translator.body.append(f'<div class="formula" tabindex="0">{mathml(node.astext(), display=True)}</div>')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
