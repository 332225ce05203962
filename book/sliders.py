"""Sliders that move without Python: a picture for each setting, drawn while the site is built.

`CHOSEN` says which of the notebooks' sliders, and which settings of each; what is not listed stays at the start. The
statements that draw are taken from the notebook itself, with what they rest on, and run here: those of the chosen ones
need NumPy and Matplotlib, and neither torch nor a compiler.
"""

import ast
import html
import inspect
import io
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from lab.cells import ROOT, alternative, needed, read, statements, used

# (chapter, cell): {control: settings}; a control with two settings or with texts becomes a menu.
CHOSEN = {
    ("03_first_cuda_kernel", "widget"): {"stride": [0, 1, 2, 4, 8, 32]},
    ("04_warp_gemv", "shuffle-widget"): {"kind": ["bfly", "down"], "step": [0, 1, 2, 3, 4, 5]},
    ("05_fusion", "weigh"): {"bits": [16, 4], "launches": [12, 10, 7, 4, 1]},
    ("07_attention_mix", "shares-widget"): {"mended": [False, True], "splits": [4, 8, 16, 32, 48]},
    ("08_flash_decoding", "online-widget"): {"token": [0, 1, 2, 3, 4, 5, 6, 7]},
    ("08_flash_decoding", "timeline-widget"): {"ring": [1, 2, 3, 4, 6]},
    ("11_ssd_math", "chunk-widget"): {"chunk": [4, 8, 16, 32, 64]},
    ("13_one_launch", "handover-widget"): {"missing": None},  # None: all that the notebook's menu has
    ("14_matmul", "phases-widget"): {"stages": [1, 2, 3, 4], "read": [1.0, 3.0]},
    ("15_fused_ssd", "places-widget"): {"places": [1, 2, 3, 4]},
    ("16_latent_attention", "turns-explore"): {"softmax": [0.5, 1.0, 1.5, 2.0, 3.0, 4.0]},
    ("17_llm", "task-line-widget"): {"slots": [1, 2, 3, 4, 5, 6]},
}


@dataclass
class Slider:
    chapter: str
    cell: str
    at: int  # the cell's number
    controls: dict  # name: {label: setting}
    start: dict  # name: setting
    others: list  # controls that stay where they are
    draw: object = field(repr=False)
    alt: str = ""

    def names(self):
        """{file name: settings} of all pictures."""
        every = itertools.product(*(range(len(options)) for options in self.controls.values()))
        return {f"{self.chapter}/{self.cell}-{'-'.join(map(str, at))}.png": self._settings(at) for at in every}

    def _settings(self, at):
        options = zip(self.controls.items(), at)
        return {name: list(labels.values())[i] for (name, labels), i in options}


def find(chapter, cell):
    """The slider of a cell, and the function behind it, made from the cells above it."""
    cells = read(ROOT / "notebooks" / f"{chapter}.ipynb")
    at = next(i for i, c in enumerate(cells) if c.get("id") == cell)
    *own, call = statements([cells[at]])
    call = call.value
    before = [*statements(cells[:at]), *own]
    names = used(call)
    body = [ast.parse("import sys").body[0], *needed(before, names)]
    space = {"__name__": f"{chapter}, {cell}"}
    exec(compile(ast.Module(body, []), f"{chapter}.ipynb", "exec"), space)
    draw = eval(compile(ast.Expression(call.args[0]), chapter, "eval"), space)
    asked = {k.arg: eval(compile(ast.Expression(k.value), chapter, "eval"), space) for k in call.keywords}
    defaults = {name: p.default for name, p in inspect.signature(draw).parameters.items()}
    start = {name: _start(spec, defaults.get(name)) for name, spec in asked.items()}
    chosen = CHOSEN[chapter, cell]
    if unknown := set(chosen) - set(asked):
        raise ValueError(f"{chapter}, {cell}: expected controls of lab.explore and found {', '.join(unknown)}")
    controls = {name: _options(asked[name], settings) for name, settings in chosen.items()}
    others = [name for name in asked if name not in controls]
    return Slider(chapter, cell, at, controls, start, others, draw, alternative(cells, at))


def _start(spec, default):
    if isinstance(spec, tuple):
        return spec[2]
    values = list(spec.values()) if isinstance(spec, dict) else spec if isinstance(spec, list) else [spec]
    return default if default in values else values[0]


def _options(spec, settings):
    """{what the reader sees: setting}, named as in the notebook's menu."""
    named = {value: label for label, value in spec.items()} if isinstance(spec, dict) else {}
    words = {True: "yes", False: "no"} if isinstance(spec, bool) else {}
    return {str(named.get(s, words.get(s, s))): s for s in (list(named) if settings is None else settings)}


def markup(slider):
    """The slider's HTML. Without scripts: the picture of the start, and a sentence."""
    names = slider.names()
    start = {name: slider.start[name] for name in slider.controls}
    shown = next((name for name, settings in names.items() if settings == start), next(iter(names)))
    controls = []
    for name, labels in slider.controls.items():
        label, texts = name.replace("_", " "), list(labels)
        first = list(labels.values()).index(names[shown][name])
        key = f"{slider.cell}-{name}"
        if len(texts) == 2 or not all(isinstance(value, (int, float)) for value in labels.values()):
            options = "".join(
                f'<option value="{i}"{" selected" * (i == first)}>{html.escape(text)}</option>'
                for i, text in enumerate(texts)
            )
            control = f'<select id="{key}">{options}</select>'
        else:
            said = html.escape(json.dumps(texts, ensure_ascii=False), quote=True)
            control = (
                f'<input type="range" id="{key}" min="0" max="{len(texts) - 1}" step="1" value="{first}" '
                f'aria-valuetext="{html.escape(texts[first])}" data-texts="{said}">'
                f'<output for="{key}">{html.escape(texts[first])}</output>'
            )
        controls.append(f'<div class="control"><label for="{key}">{label}</label>{control}</div>')
    stay = [f"{name.replace('_', ' ')} = {_said(slider.start[name])}" for name in slider.others]
    note = f" Here {', '.join(stay)}; in the notebook, these move too." if stay else ""
    alt = html.escape(slider.alt, quote=True)
    return (
        f'<div class="slider" data-pictures="../pictures/{slider.chapter}/{slider.cell}-">'
        f'<div class="controls" hidden>{"".join(controls)}</div>'
        f'<img class="picture" src="../pictures/{shown}" alt="{alt}" loading="lazy" aria-live="polite">'
        '<p class="note"><span class="still">A slider needs JavaScript; this is one of its settings.</span>'
        f"{note}</p></div>"
    )


def _said(value):
    return {"True": "yes", "False": "no", "None": "nothing"}.get(str(value), value)


def draw(slider, folder):
    """Write all pictures of a slider; they have one size, so that nothing jumps."""
    import matplotlib

    matplotlib.use("agg")
    for name, settings in slider.names().items():
        picture = slider.draw(**{other: slider.start[other] for other in slider.others} | settings)
        data = io.BytesIO()
        picture.savefig(data, format="png", dpi=100)
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.getvalue())


def main(folder):
    for key in CHOSEN:
        draw(find(*key), folder)


if __name__ == "__main__":
    main(sys.argv[1])
