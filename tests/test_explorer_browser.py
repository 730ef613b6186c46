"""The explorer as a person uses it, in Chromium driven by Playwright: in JupyterLab, and as a Voilà app.

Skipped, with the reason, where one of them is missing."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import ExitStack

import pytest
from conftest import ROOT

from c2lip.release import save
from c2lip.towers import load

BROWSER = next(
    (p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")) if p), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need: pip install playwright")
pytestmark = [
    pytest.mark.skipif(
        BROWSER is None, reason="the browser tests need Chromium: apt-get install --no-install-recommends chromium"
    ),
    pytest.mark.timeout(600),
]

PANEL, STATUS, FIGURE = ".c2lip-explorer", ".c2lip-status", "img.c2lip-figure"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    "JupyterLab and, where it is installed, Voilà, each with a copy of explore.ipynb: name → (address, token)"
    home, running, token = tmp_path_factory.mktemp("home"), {}, secrets.token_hex(8)
    shutil.copy(ROOT / "nbs" / "explore.ipynb", home)
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "page_config.json").write_text(
        json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}})
    )
    env = os.environ | dict(
        JUPYTER_CONFIG_DIR=str(home / "config"),
        JUPYTER_DATA_DIR=str(home / "share"),
        JUPYTER_RUNTIME_DIR=str(home / "run"),
        HOME=str(home),
        PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        OMP_NUM_THREADS="1",
    )
    commands = dict(
        lab=[
            "jupyter-lab",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--IdentityProvider.token={token}",
            f"--ServerApp.root_dir={home}",
        ],
        voila=["voila", str(home / "explore.ipynb"), "--Voila.ip=127.0.0.1"],
    )
    commands = {name: command for name, command in commands.items() if shutil.which(command[0])}
    with ExitStack() as stack:
        for name, command in commands.items():
            port = free_port()
            log = stack.enter_context(open(home / f"{name}.log", "w"))
            command = [*command, "--no-browser", f"--port={port}"]
            server = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=home)
            stack.callback(stop, server)
            running[name] = port, server
        for name, (port, server) in running.items():
            wait_for_port(port, server, home / f"{name}.log")
        yield {name: (f"http://127.0.0.1:{port}", token) for name, (port, _) in running.items()}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def stop(server):
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()


def wait_for_port(port, server, log):
    deadline = time.time() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
        assert server.poll() is None and time.time() < deadline, log.read_text()[-2000:]


@pytest.fixture(scope="module")
def tuned(servers, tmp_path_factory):  # after the servers, so that they start meanwhile
    "A release folder with other weights than the base's"
    import torch

    model = load("base")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.model.parameters():
            if p.ndim > 1:
                p.add_(0.05 * p.std(correction=0) * torch.randn_like(p))
    return save(model, tmp_path_factory.mktemp("tuned") / "model", dict(note="noise for a test"))


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


def keep(page, name):
    "A screenshot kept as an artefact"
    (ROOT / "_proc").mkdir(exist_ok=True)
    page.screenshot(path=str(ROOT / "_proc" / f"{name}.png"))


def wait_for_panel(page, name):
    try:
        page.wait_for_selector(STATUS)
        page.wait_for_selector(FIGURE)
    except playwright.TimeoutError:
        keep(page, f"{name}-failed")
        raise AssertionError(f"the explorer did not appear; see _proc/{name}-failed.png") from None


@pytest.fixture(scope="module")
def page(servers, tuned, browser):
    "The notebook in JupyterLab, all cells run"
    address, token = servers["lab"]
    page = browser.new_page(viewport=dict(width=1280, height=1000))
    page.set_default_timeout(120_000)
    page.goto(f"{address}/lab/tree/explore.ipynb?token={token}&reset")
    page.wait_for_selector(".jp-Notebook")

    def sessions():
        with urllib.request.urlopen(f"{address}/api/sessions?token={token}") as answer:
            return json.load(answer)

    deadline = time.time() + 120  # Run All before the kernel is connected is dropped without a word
    while not any(s["kernel"]["execution_state"] == "idle" and s["kernel"]["connections"] for s in sessions()):
        assert time.time() < deadline, "no kernel"
        time.sleep(0.1)
    page.wait_for_function("/\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.textContent)")
    page.keyboard.press("Control+B")  # the file browser makes room
    page.click('.lm-MenuBar-itemLabel:text-is("Run")')
    page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
    wait_for_panel(page, "explorer-lab")
    return page


CHANGED = "([s, say, f, draw]) => document.querySelector(s).innerText != say && document.querySelector(f).src != draw"


def after(page, act):
    "Do `act`; (the new status, seconds until status and figure were there)"
    say, draw = page.inner_text(STATUS), page.get_attribute(FIGURE, "src")
    for seconds in (40, 120):  # a key pressed while a loaded page redraws is lost: press again, as a person would
        start = time.time()
        act()
        try:
            page.wait_for_function(CHANGED, arg=[STATUS, say, FIGURE, draw], polling=20, timeout=1000 * seconds)
            break
        except playwright.TimeoutError:
            if seconds == 120:
                raise
    return page.inner_text(STATUS), time.time() - start


def upload(page, file):
    with page.expect_file_chooser() as chooser:
        page.click(f"{PANEL} .widget-upload")
    chooser.value.set_files(str(file))


def focused(page):
    "The text, placeholder or value of what has the focus"
    return page.evaluate(
        "(e => e.tagName == 'SELECT' ? 'menu' : e.placeholder || e.innerText || e.className)(document.activeElement)"
    )


def tab_to(page, wanted, key="Tab"):
    "Press Tab until `wanted` has the focus"
    for _ in range(60):
        page.keyboard.press(key)
        if re.fullmatch(wanted, focused(page)):
            return
    raise AssertionError(f"{wanted} cannot be reached with {key}")


def test_a_visit(page, tuned, tmp_path):
    took = {}
    say = page.inner_text(STATUS)
    assert "“" in say and "v·c" in say
    # a chip
    chip = page.locator(".c2lip-chips button:not(.mod-primary)", has_text="a ").first
    wanted = chip.inner_text()
    say, took["chip"] = after(page, chip.click)
    assert f"“{wanted}”" in say
    # another model, typed; then one of the menu
    field = page.get_by_placeholder("or: folder")
    say, took["model"] = after(page, lambda: (field.fill(str(tuned)), field.press("Enter")))
    assert f"→ {tuned.parent.name}" in say
    say, took["menu"] = after(
        page, lambda: page.locator(f"{PANEL} select").first.select_option(label=tuned.parent.name)
    )
    assert "both are the same model" in say
    say, _ = after(page, lambda: page.locator(f"{PANEL} select").first.select_option(label="base"))
    # a map kind, and the slider by keyboard
    say, took["kind"] = after(page, page.get_by_role("button", name="softmax", exact=True).click)
    assert "β = 10" in say
    page.locator(f"{PANEL} .noUi-handle").first.focus()
    say, took["slider"] = after(page, lambda: page.keyboard.press("ArrowRight"))
    assert "β = 11.2" in say
    # two phrases
    field = page.get_by_placeholder("a red mug | a blue mug")
    say, took["phrases"] = after(page, lambda: (field.fill("a red mug | a blue mug"), field.press("Enter")))
    assert "“a red mug”" in say and "“a blue mug”" in say
    # another image
    say, took["scene"] = after(page, page.locator(".c2lip-shelf button").nth(2).click)
    assert say.startswith("scene 3") and page.locator(".c2lip-shelf button.mod-primary").inner_text() == "3"
    # what is broken is said, and the image stays
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n but no more")
    draw = page.get_attribute(FIGURE, "src")
    upload(page, broken)
    page.wait_for_selector(".c2lip-wrong")
    assert "broken.png" in page.inner_text(STATUS) and "scene 3" in page.inner_text(STATUS)
    page.get_by_placeholder("path of an image").fill("/no/such/image.png")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.c2lip-status').innerText.includes('/no/such')")
    # and a good one of the user's afterwards
    from PIL import Image

    Image.linear_gradient("L").resize((300, 200)).convert("RGB").save(tmp_path / "mine.png")
    say, took["upload"] = after(page, lambda: upload(page, tmp_path / "mine.png"))
    assert (
        say.startswith("mine.png")
        and not page.locator(".c2lip-wrong").count()
        and page.get_attribute(FIGURE, "src") != draw
    )
    print("\nseconds from act to figure:", {k: round(v, 2) for k, v in took.items()})
    assert not page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count()


def test_a_keyboard_is_enough(page):
    "Everything from the cell on with Tab, Enter, space and arrows; JupyterLab's own keys keep out of it"
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    page.locator(".jp-InputPrompt").last.click()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowUp")
    tab_to(page, "menu")
    scene = "10" if page.inner_text(STATUS).startswith("binding 9") else "9"  # another one than is shown
    tab_to(page, scene)
    say, _ = after(page, lambda: page.keyboard.press("Enter"))
    assert say.startswith(f"binding {scene}") and focused(page) == scene
    page.keyboard.press("b")  # would add a cell
    tab_to(page, r"\+")
    say, _ = after(page, lambda: page.keyboard.press("Space"))
    assert say.count("“") == 2 and focused(page) == "−"
    say, _ = after(page, lambda: page.keyboard.press("Enter"))
    assert say.count("“") == 1 and focused(page) == "+"
    tab_to(page, "a red mug .*")
    page.keyboard.press("Control+A")
    page.keyboard.type("a yellow hat")
    say, _ = after(page, lambda: page.keyboard.press("Enter"))
    assert "“a yellow hat”" in say
    tab_to(page, "centred")
    say, _ = after(page, lambda: page.keyboard.press("Space"))
    assert "above" in say and focused(page) == "centred"
    tab_to(page, "menu", "Shift+Tab")
    tab_to(page, "menu", "Shift+Tab")
    say, _ = after(page, lambda: page.keyboard.press("ArrowDown"))
    assert focused(page) == "menu" and page.locator(".jp-Notebook .jp-Cell").count() == cells
    say, _ = after(page, lambda: page.keyboard.press("ArrowUp"))


# names of the widgets that reach beyond the explorer's right edge
OUTSIDE = """() => {
    const box = document.querySelector('.c2lip-explorer').getBoundingClientRect();
    const beyond = e => e.offsetWidth && e.getBoundingClientRect().right > box.right + 2;
    return [...document.querySelectorAll('.c2lip-explorer *')]
        .filter(e => beyond(e) && !e.closest('.noUi-target')).map(e => e.className);
}"""
SHELF_TOPS = """() => [...document.querySelectorAll('.c2lip-shelf button')]
    .map(e => e.offsetTop + e.offsetParent.offsetTop)"""


def test_it_fits_the_page(page):
    "Nothing stands out on the right, at either width; the screenshots are for looking at"
    if not page.inner_text(STATUS).startswith("binding 10"):
        after(page, page.locator(".c2lip-shelf button").nth(9).click)
    for width in (1280, 900):
        page.set_viewport_size(dict(width=width, height=1400))
        page.wait_for_timeout(400)
        page.evaluate(f"document.querySelector('{PANEL}').scrollIntoView()")
        page.wait_for_timeout(400)
        keep(page, f"explorer-{width}")
        over = page.evaluate(OUTSIDE)
        assert not over, over
        assert len(set(page.evaluate(SHELF_TOPS))) == 1
        assert page.evaluate("document.querySelector('img.c2lip-figure').getBoundingClientRect().width") > 500


def test_the_app(servers, browser):
    "Voilà: the page without its code, and the panel works"
    if "voila" not in servers:
        pytest.skip("the app's test needs Voilà: pip install voila")
    page = browser.new_page(viewport=dict(width=1280, height=1400))
    page.set_default_timeout(120_000)
    page.goto(servers["voila"][0])
    wait_for_panel(page, "explorer-app")
    assert "What does a phrase look at" in page.inner_text("body") and "from c2lip" not in page.inner_text("body")
    chip = page.locator(".c2lip-chips button:not(.mod-primary)", has_text="a ").first
    wanted = chip.inner_text()
    assert f"“{wanted}”" in after(page, chip.click)[0]
    field = page.get_by_placeholder("a red mug | a blue mug")
    field.fill(" ")
    field.press("Enter")
    page.wait_for_selector(".c2lip-wrong")
    assert "empty" in page.inner_text(STATUS)
    keep(page, "explorer-app")
