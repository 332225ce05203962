"""Sphinx's settings. Whatever a page needs lies beside it: no fonts, scripts or pictures from elsewhere."""

import os
from pathlib import Path

HERE = Path(os.environ["BOOK"])  # the folder of this file; Sphinx runs a copy of it

project = "From Matmul to Mamba"
copyright = "the authors; Apache-2.0"
extensions = ["myst_parser", "book.maths"]
myst_enable_extensions = ["dollarmath"]
root_doc = "index"
language = "en"
suppress_warnings = ["myst.header"]  # exercises may begin below the first heading
nitpicky = True

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = [str(HERE / "static")]
html_extra_path = [os.environ["BOOK_EXTRA"]]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_favicon = str(HERE / "static/favicon.svg")
pygments_style = "a11y-high-contrast-light"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
html_theme_options = {
    "navbar_start": [],  # the sidebar has the search
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
if os.environ.get("BOOK_REPOSITORY"):
    html_theme_options["repository_url"] = "https://github.com/" + os.environ["BOOK_REPOSITORY"]
    html_theme_options["use_repository_button"] = True


def setup(app):
    from pygments.lexers import CudaLexer

    app.add_lexer("cuda", CudaLexer)
