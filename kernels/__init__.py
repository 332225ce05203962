"""The ladders: one folder a topic, one rung a file, with thin launchers, and the figures measured on them.

Stands on `lab`. What may not enter: anything that only teaches (notebooks), and anything that several topics'
workbenches need (lab).

Hugging Face has a package of this name, which transformers imports. Where both are on Python's path, this one ahead,
`import kernels` means this one, and what it lacks is looked for in the other: its names and its modules are found here.
Installed by pip, the course's is matmul_to_mamba.kernels, and the two never meet (see lab/wheel.py).
"""

import importlib.util
import pkgutil
from pathlib import Path

_OURS = Path(__file__).resolve().parent
_other = []  # the namesake, once a name of its own was asked for; while it is imported, None

if __name__ == "kernels":  # modules: first here, then in a package of this name, unless it is the course's again
    _all = pkgutil.extend_path(__path__, __name__)
    __path__ = [*_all[:1], *(path for path in _all[1:] if not Path(path, "compiling.py").exists())]


def __getattr__(name):
    """A name of the namesake's __init__, which runs when the first one is asked for."""
    private = name.startswith("__") and name != "__version__"
    if len(__path__) > 1 and not private and not any((_OURS / file).exists() for file in (name, f"{name}.py")):
        if not _other:
            _other.append(None)
            try:
                _other[0] = _imported(Path(__path__[1], "__init__.py"))
            finally:
                if _other[0] is None:
                    _other.clear()
        if hasattr(_other[0], name):
            return getattr(_other[0], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(path):
    spec = importlib.util.spec_from_file_location(__name__, path, submodule_search_locations=__path__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
