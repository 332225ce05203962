"""The course in a real browser: `make browser-test` runs this file, `make test` does not.

JupyterLab starts as `make lab` starts it, on a copy of the notebooks without outputs, and Chromium does what a
learner does: runs chapters, moves a slider, follows a link to the glossary, solves an exercise.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from lab.notebooks import MARKER

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ("01_roofline", "03_first_cuda_kernel", "04_warp_gemv")
TOKEN = "browser-test"
SECONDS = 120  # for a notebook to run


# The course, its server, its browser


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A folder like the course's own, where notebooks may be changed. They have no outputs: what is seen was made."""
    folder = tmp_path_factory.mktemp("course")
    for name in ("notebooks", "exercises"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for path in (folder / name).glob("*.ipynb"):
            notebook = read(path)
            for cell in code_cells(notebook):
                cell.update(outputs=[], execution_count=None)
            path.write_text(json.dumps(notebook))
    for name in ("ref", "simt", "lab", "kernels", "models"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def server(browser, course, tmp_path_factory):
    """The address of a JupyterLab that `make lab` started. It is ended whatever happens."""
    own = tmp_path_factory.mktemp("jupyter")
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTERLAB_SETTINGS_DIR")
    env = {name: str(own / name) for name in (*folders, "JUPYTERLAB_WORKSPACES_DIR")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--no-browser --port={port} --ServerApp.port_retries=0 --ServerApp.root_dir='{course}'"
    # Should this process be killed outright, the kernels and then the server go by themselves.
    options += " --MappingKernelManager.cull_idle_timeout=300 --ServerApp.shutdown_no_activity_timeout=60"
    log = own / "log"
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the lines after `yield` run
    with open(log, "w") as out:
        process = subprocess.Popen(
            ["make", "lab", f"ARGS={options}"],
            cwd=ROOT,
            env={**os.environ, **env, "JUPYTER_TOKEN": TOKEN},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or answers(address), 60, "JupyterLab to answer")
        assert process.poll() is None, log.read_text()
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        signal.signal(signal.SIGTERM, before)


def answers(address):
    try:
        return urllib.request.urlopen(f"{address}/api", timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def browser():
    """A Chromium. Where there is none, or no Playwright to drive it, the tests are skipped."""
    missing = "Playwright is not here and could not be installed: pip install playwright"
    playwright = pytest.importorskip("playwright.sync_api", reason=missing)
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as p:
        if not path and Path(p.chromium.executable_path).exists():
            path = p.chromium.executable_path  # what `python -m playwright install chromium` brings
        if not path:
            pytest.skip("no Chromium here: apt install chromium, or name one with CHROMIUM=/path/to/it")
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A fresh page; no error may appear in its console."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert errors == []


# What a learner does


class Notebook:
    """A notebook open in JupyterLab. Its file is looked at after each save, since the page shows only a part."""

    def __init__(self, page, server, course, name):
        self.page, self.server, self.file, self.name = page, server, course / f"{name}.ipynb", f"{name}.ipynb"
        page.goto(f"{server}/lab/tree/{self.name}?reset&token={TOKEN}")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        until(self.idle, 60, f"the kernel of {name}")

    def idle(self):
        request = urllib.request.Request(f"{self.server}/api/sessions", headers={"Authorization": f"token {TOKEN}"})
        sessions = json.load(urllib.request.urlopen(request, timeout=10))
        return [s["kernel"]["execution_state"] for s in sessions if s["path"] == self.name] == ["idle"]

    def save(self):
        with self.page.expect_response(lambda r: r.request.method == "PUT" and "/api/contents/" in r.url):
            self.page.keyboard.press("Control+s")
        return read(self.file)

    def run_all(self):
        """Run all cells from the menu, and wait until each has run. -> the notebook, as saved."""
        self.page.click(".lm-MenuBar-itemLabel:text-is('Run')")
        self.page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            until(self.idle, SECONDS, f"{self.name} to run")
            notebook = self.save()
            cells = [cell for cell in code_cells(notebook) if "".join(cell["source"]).strip()]
            wrong = [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]
            assert wrong == []
            if all(cell["execution_count"] for cell in cells):
                return notebook
            time.sleep(0.5)
        not_run = [cell["id"] for cell in cells if not cell["execution_count"]]
        pytest.fail(f"expected {self.name} to run in {SECONDS} s; not run: {not_run}")

    def scroll_to(self, selector):
        """The first such element that appears on the way down from the top. JupyterLab draws what is in view."""
        found = self.page.locator(f".jp-Notebook {selector}").first
        outer = self.page.locator(".jp-WindowedPanel-outer").first
        outer.evaluate("e => e.scrollTo(0, 0)")
        for _ in range(200):
            if found.count():
                found.scroll_into_view_if_needed()
                return found
            outer.evaluate("e => e.scrollBy(0, 500)")
            self.page.wait_for_timeout(150)
        pytest.fail(f"expected {selector} in {self.name} and found none")


def drag(handle, track):
    """Take a slider's handle over to the other side of its track."""
    for _ in range(20):  # what is drawn above may still push it down
        before = handle.bounding_box()
        handle.hover()
        handle.page.wait_for_timeout(300)
        if handle.bounding_box() == before:
            break
    mouse, base = handle.page.mouse, track.bounding_box()
    share = 0.1 if before["x"] > base["x"] + base["width"] / 2 else 0.9
    mouse.down()
    mouse.move(base["x"] + base["width"] * share, before["y"] + before["height"] / 2, steps=8)
    mouse.up()


def until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds} s for {what}")
        time.sleep(0.1)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


# The tests


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_runs_and_its_slider_moves_the_picture(chapter, page, server, course):
    notebook = Notebook(page, server, course, f"notebooks/{chapter}")
    saved = notebook.run_all()
    said = [o for cell in code_cells(saved) for o in cell["outputs"] if o.get("name") == "stderr"]
    assert said == []

    handle = notebook.scroll_to(".widget-slider .noUi-handle")
    widget = handle.locator("xpath=ancestor::*[contains(@class, 'widget-vbox')][1]")
    picture = widget.locator(".jp-OutputArea").first
    before = picture.inner_html()
    assert re.search("<(img|svg|table)", before)
    drag(handle, widget.locator(".noUi-base").first)
    until(lambda: picture.inner_html() not in ("", before), 30, "the picture to change")
    assert re.search("<(img|svg|table)", picture.inner_html())


def test_an_exercise_is_solved(page, server, course):
    notebook = Notebook(page, server, course, "exercises/03_first_cuda_kernel")
    unsolved = {cell["id"]: cell for cell in notebook.run_all()["cells"]}
    assert "not done yet" in json.dumps(unsolved["ex1-check"]["outputs"])
    solved = {cell["id"]: cell for cell in read(ROOT / "solutions" / notebook.file.name)["cells"]}["ex1-code"]
    lines = "".join(solved["source"]).split("\n")
    answer = "\n".join(line for line in lines if not MARKER.fullmatch(line))

    notebook.scroll_to(".jp-CodeCell:has-text('def grid_for') .cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(answer)
    page.keyboard.press("Shift+Enter")  # runs it, and goes on to the check
    page.keyboard.press("Shift+Enter")
    verdict = notebook.scroll_to(".jp-CodeCell:has-text('check.exercise_1') .jp-OutputArea")
    until(lambda: "passed: " in verdict.inner_text(), 60, "the check to pass")
    after = {cell["id"]: cell for cell in notebook.save()["cells"]}
    assert "".join(after["ex1-code"]["source"]) == answer


def test_a_word_leads_to_its_entry_in_the_glossary(page, server, course):
    notebook = Notebook(page, server, course, "notebooks/01_roofline")
    notebook.scroll_to("a[href*='#roofline']").click()
    entry = page.locator(".jp-MarkdownViewer p:has-text('roof, roofline')")
    entry.wait_for(timeout=30_000)
    until(lambda: 0 < (entry.bounding_box() or {"y": 0})["y"] < 900, 10, "the entry to be in view")
