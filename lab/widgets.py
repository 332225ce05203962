"""Sliders and menus that redraw a picture."""

import contextlib
import inspect


def explore(draw, **controls):
    """Show controls and the picture that draw(**values) returns; it is redrawn whenever a control moves.

    controls  name=(low, high, start): a slider of whole numbers, or of numbers if one of the three is a float;
              name=[256, 1024, 4096]: a slider over these numbers;  name=["a", "b"] or {"label": value, ...}: a menu;
              name=True or False: a tick box.
              A slider over listed numbers and a menu start at the first value, or at draw's default for this name.
    Returns the widget; in a viewer that shows none, look at the still picture beside it.
    """
    import ipywidgets as widgets
    from IPython.core.formatters import format_display_data

    defaults = {name: p.default for name, p in inspect.signature(draw).parameters.items()}
    made = {name: _control(widgets, name, spec, defaults.get(name)) for name, spec in controls.items()}
    picture = widgets.Output()

    def redraw(_change=None):
        values = {name: control.value for name, control in made.items()}
        with contextlib.suppress(KeyboardInterrupt):
            data, metadata = format_display_data(draw(**values))
            # Put there, and not displayed inside `with picture`: what is captured so comes back by way of whoever runs
            # the notebook, and nbclient then may miss the end of the cell and wait for ever.
            picture.outputs = ({"output_type": "display_data", "data": data, "metadata": metadata},)

    for control in made.values():
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([*made.values(), picture])


def _control(widgets, name, spec, default):
    label = name.replace("_", " ")
    look = {"description": label, "style": {"description_width": "11em"}, "layout": {"width": "34em"}}
    if isinstance(spec, bool):
        return widgets.Checkbox(value=spec, **look)
    if isinstance(spec, (dict, list)):
        options = list(spec.items()) if isinstance(spec, dict) else spec
        values = [value for _, value in options] if isinstance(spec, dict) else spec
        numbers = isinstance(spec, list) and all(isinstance(value, (int, float)) for value in spec)
        kind = widgets.SelectionSlider if numbers else widgets.Dropdown
        start = default if default in values else values[0]
        return kind(options=options, value=start, **({"continuous_update": False} if numbers else {}), **look)
    low, high, start = spec
    if any(isinstance(v, float) for v in spec):
        return widgets.FloatSlider(
            min=low, max=high, value=start, step=(high - low) / 100, continuous_update=False, **look
        )
    return widgets.IntSlider(min=low, max=high, value=start, continuous_update=False, **look)
