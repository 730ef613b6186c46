"""The explorer as a person uses it: JupyterLab in Chromium, driven by Playwright.

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
from contextlib import suppress

import pytest
from conftest import BROWSER, ROOT, free_port
from PIL import Image

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need: pip install playwright")
pytestmark = [
    pytest.mark.skipif(
        BROWSER is None, reason="the browser tests need Chromium: apt-get install --no-install-recommends chromium"
    ),
    pytest.mark.timeout(600),
]

PANEL = ".c2lip-explorer"
STATUS = ".c2lip-status"
FIGURE = ".c2lip-frame img"
PHRASE, STATE = "a red mug | a blue mug", "the text of another visit"  # hints of fields


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    "JupyterLab with a copy of explore.ipynb: its address, its token"
    home = tmp_path_factory.mktemp("home")
    shutil.copy(ROOT / "nbs" / "explore.ipynb", home)
    (home / "config" / "labconfig").mkdir(parents=True)
    quiet = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (home / "config" / "labconfig" / "page_config.json").write_text(json.dumps(quiet))

    folders = {f"JUPYTER_{name.upper()}_DIR": str(home / name) for name in ("config", "data", "runtime")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | folders | dict(HOME=str(home), PYTHONPATH=path, OMP_NUM_THREADS="1")
    port, token = free_port(), secrets.token_hex(8)
    line = f"jupyter-lab --allow-root --no-browser --ip=127.0.0.1 --port={port}"
    line += f" --IdentityProvider.token={token} --ServerApp.root_dir={home}"

    with open(home / "log", "w") as log:
        server = subprocess.Popen(line.split(), env=env, stdout=log, stderr=log, cwd=ROOT)
        try:
            wait_for_port(port, server, home / "log")
            yield f"http://127.0.0.1:{port}", token
        finally:
            stop(server)


def stop(server):
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(20)
    server.kill()


def wait_for_port(port, server, log):
    deadline = time.time() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        assert server.poll() is None and time.time() < deadline, log.read_text()[-2000:]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        args = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = play.chromium.launch(executable_path=BROWSER, args=args)
        yield browser
        browser.close()


def wait_for_panel(page):
    page.wait_for_selector(FIGURE)
    settle(page)


@pytest.fixture(scope="module")
def lab(served, browser):
    "The notebook in JupyterLab, all cells run"
    address, token = served
    page = browser.new_page()
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
    wait_for_panel(page)
    return page


@pytest.fixture
def page(lab):
    "JupyterLab with the explorer as it is for every test: folds closed, the base alone, the first image of the gallery"
    lab.set_viewport_size(dict(width=1280, height=1000))
    restore(lab, "model=base&image=1&phrase=a+green+cat")
    for name in FOLDS:
        unfold(lab, name, False)
    return lab


# The panel numbers its answers. The number is written with the status, after maps and widgets, and is missing while it
# says "drawing…": so what is read after `settle` belongs together, and an answer with a higher number is a new one.
ANSWERED = f"least => Number(document.querySelector('{STATUS}')?.dataset.answers) >= least"


def settle(page, least=1):
    "Wait until the panel has given `least` answers and is not drawing; (its status, the number of answers)"
    page.wait_for_function(ANSWERED, arg=least, polling=20)
    status = page.locator(STATUS)
    return status.inner_text(), int(status.get_attribute("data-answers"))


def after(page, act):
    "Do `act`, once; the new status"
    _, answers = settle(page)
    act()
    return settle(page, answers + 1)[0]


def enter(page, field, text):
    "Type into the field with this hint, and Enter; the new status"
    field = page.get_by_placeholder(field)
    return after(page, lambda: (field.fill(str(text)), field.press("Enter")))


def upload(page, file):
    with page.expect_file_chooser() as chooser:
        page.click(f"{PANEL} .widget-upload")
    chooser.value.set_files(str(file))


def focused(page):
    "The text, placeholder or value of what has the focus"
    words = "e.tagName == 'SELECT' ? 'menu' : e.placeholder || e.innerText || e.className"
    return page.evaluate(f"(e => {words})(document.activeElement)")


def tab_to(page, wanted, key="Tab"):
    "Press Tab until `wanted` has the focus"
    for _ in range(60):
        page.keyboard.press(key)
        if re.fullmatch(wanted, focused(page)):
            return
    raise AssertionError(f"{wanted} cannot be reached with {key}")


FOLDS = "more models", "images", "map", "take along"


def unfold(page, name, opened=True):
    "Open a fold, if it is closed, and wait until it is open; or the reverse"
    button = page.locator(f"{PANEL} button.widget-toggle-button", has_text=f"{name} ▾")
    if ("mod-active" in button.get_attribute("class")) != opened:
        button.click()
    wait_for_fold(page, name, "visible" if opened else "hidden")


def wait_for_fold(page, name, state="visible"):
    "The server shows and hides a fold, a moment after its button"
    page.locator(f"{PANEL} .c2lip-fold").nth(FOLDS.index(name)).wait_for(state=state)


def restore(page, state):
    "Show what the text of a state says"
    unfold(page, "take along")
    field = page.get_by_placeholder(STATE)
    settle(page)
    if field.input_value() != state:
        after(page, lambda: (field.fill(state), field.press("Enter")))
    assert not page.locator(".c2lip-wrong").count(), page.inner_text(STATUS)


def chosen_scene(page):
    "The number of the image on show, from the pressed button of the shelf"
    settle(page)
    return page.locator(".c2lip-shelf button.mod-primary").inner_text()


def test_a_visit(page, tmp_path):
    assert "“" in page.inner_text(STATUS)
    assert "best patch" in page.inner_text(".c2lip-maps")
    assert "Which sentence fits the image?" in page.inner_text(PANEL)
    assert page.locator(".c2lip-scores tr").count() == 3

    chip = page.locator(".c2lip-chips button:not(.mod-primary)", has_text="a ").first
    wanted = chip.inner_text()
    assert f"“{wanted}”" not in page.inner_text(STATUS)
    assert f"“{wanted}”" in after(page, chip.click)

    # another model of the menu
    menu = page.locator(f"{PANEL} select").nth(1)
    assert "→ tuned" in after(page, lambda: menu.select_option(label="tuned"))
    assert page.locator(".c2lip-maps figure").count() == 4

    # on a narrow page and a wide one; a map kind, the slider by keyboard
    unfold(page, "map")
    check_layout(page, "explorer-lab", 400, 1400)
    assert "β = 10" in after(page, page.get_by_role("button", name="softmax", exact=True).click)

    page.locator(f"{PANEL} .noUi-handle").first.focus()
    assert "β = 11.2" in after(page, lambda: page.keyboard.press("ArrowRight"))

    text = after(page, page.get_by_role("button", name="pooling head", exact=True).click)
    assert "head’s attention" in text

    text = enter(page, PHRASE, "a red mug | a blue fish")
    assert "“a red mug”" in text
    assert "“a blue fish”" in text
    assert after(page, page.locator(".c2lip-shelf img").nth(2).click).startswith("scene 3")
    assert chosen_scene(page) == "3"
    assert "highest" in page.locator(FIGURE).nth(1).get_attribute("alt")

    # of a broken image the status says so, and the last one stays
    unfold(page, "images")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n but no more")
    shown = page.get_attribute(FIGURE, "src")
    text = after(page, lambda: upload(page, tmp_path / "broken.png"))
    assert page.locator(".c2lip-wrong").count()
    assert "broken.png" in text
    assert "scene 3" in text

    Image.linear_gradient("L").resize((300, 200)).convert("RGB").save(tmp_path / "mine.png")
    text = after(page, lambda: upload(page, tmp_path / "mine.png"))
    assert text.startswith("mine.png: type a phrase")
    assert not page.locator(".c2lip-wrong").count()
    assert page.get_attribute(FIGURE, "src") != shown
    assert page.locator(FIGURE).count() == 1
    assert "never saw such an image" in enter(page, PHRASE, "a red mug")
    assert not page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count()


def download(page, name):
    "What the browser stores after a click on PNG, SVG or PDF: its name, its bytes"
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name, exact=True).click()
    return waiting.value.suggested_filename, waiting.value.path().read_bytes()


def test_what_is_taken_along(page):
    "Files by the browser, and a text that brings a state back"
    restore(page, "model=base&model=tuned&image=9&phrase=a+red+key")
    starts = dict(PNG=b"\x89PNG", SVG=b"<?xml", PDF=b"%PDF")
    for kind, start in [*starts.items(), ("PDF", b"%PDF")]:  # one of them twice
        name, data = download(page, kind)
        assert name == f"maps.{kind.lower()}"
        assert data.startswith(start)

    shown, _ = settle(page)
    state = page.get_by_placeholder(STATE).input_value()
    assert "image=9" in state

    after(page, page.locator(".c2lip-shelf button").nth(0).click)
    assert enter(page, STATE, state) == shown


# what a person does who does not wait: a chip, and the next moment some letters in the field
TYPE_AT_ONCE = """([chip, text]) => {
    const field = document.querySelector('input[placeholder*="a red mug"]');
    [...document.querySelectorAll('.c2lip-chips button')].find(e => e.innerText == chip).click();
    field.focus();
    field.value = text;
    field.dispatchEvent(new Event('input', {bubbles: true}));
}"""


def test_nothing_typed_is_lost(page):
    "What is typed while the maps are drawn stays in its field"
    other = page.locator(".c2lip-chips button:not(.mod-primary):not(.c2lip-beside)").first.inner_text()
    assert f"“{other}”" in after(page, lambda: page.evaluate(TYPE_AT_ONCE, [other, "a yellow ha"]))
    assert page.get_by_placeholder(PHRASE).input_value() == "a yellow ha"
    page.keyboard.type("t")
    assert "“a yellow hat”" in after(page, lambda: page.keyboard.press("Enter"))


def test_a_keyboard_is_enough(page):
    "Everything from the cell on with Tab, Enter, space and arrows; JupyterLab's own keys keep out of it"
    unfold(page, "take along", False)
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    page.locator(".jp-InputPrompt").last.click()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowUp")
    tab_to(page, "menu")
    assert chosen_scene(page) == "1"

    tab_to(page, "9")
    text = after(page, lambda: page.keyboard.press("Enter"))
    assert text.startswith("binding 9")
    assert focused(page) == "9"
    assert chosen_scene(page) == "9"

    page.keyboard.press("b")  # would add a cell
    tab_to(page, r"\+", "Shift+Tab")
    text = after(page, lambda: page.keyboard.press("Space"))
    assert text.count("“") == 2
    assert focused(page) == "−"

    tab_to(page, ".* a red mug .*", "Shift+Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("a yellow hat")
    assert "“a yellow hat”" in after(page, lambda: page.keyboard.press("Enter"))

    tab_to(page, "without attribute")
    text = after(page, lambda: page.keyboard.press("Enter"))
    assert "“a hat”" in text
    assert focused(page) == "without attribute"

    tab_to(page, "map .*", "Shift+Tab")
    page.keyboard.press("Space")
    wait_for_fold(page, "map")
    tab_to(page, "similarity")
    text = after(page, lambda: page.keyboard.press("Space"))
    assert "cosine c·v′" in text
    assert focused(page) == "similarity"
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells


# names of the widgets that reach beyond the explorer's right edge
OUTSIDE = """() => {
    const box = document.querySelector('.c2lip-explorer').getBoundingClientRect();
    const beyond = e => e.offsetWidth && e.getBoundingClientRect().right > box.right + 2;
    return [...document.querySelectorAll('.c2lip-explorer *')]
        .filter(e => beyond(e) && !e.closest('.noUi-target')).map(e => e.className);
}"""
PANEL_PLACES = """() => [...document.querySelectorAll('.c2lip-maps figure')].map(e => {
    const box = e.getBoundingClientRect();
    return [Math.round(box.top), Math.round(box.width)];
})"""


def check_layout(page, name, *widths):
    "Nothing reaches beyond the right edge, panels of a row are of one width and none is alone"
    for width in widths:
        page.set_viewport_size(dict(width=width, height=1400))
        page.evaluate(f"document.querySelector('{PANEL}').scrollIntoView()")
        page.wait_for_timeout(400)
        page.screenshot(path=ROOT / "_proc" / f"{name}-{width}.png")  # kept as an artefact
        over = page.evaluate(OUTSIDE)
        assert not over, over
        places = page.evaluate(PANEL_PLACES)
        rows = {top: [width for t, width in places if t == top] for top, _ in places}
        assert len({len(widths) for widths in rows.values()}) == 1, rows
        assert len({width for _, width in places}) == 1 and places[0][1] >= 130, rows


CONTROLS = "button", "textbox", "combobox", "checkbox", "slider", "radio", "spinbutton", "link"


def test_a_screen_reader_meets_names(page):
    "A name for every control and image of the panel; a new status is read aloud"
    restore(page, "model=base&model=tuned&image=1&phrase=a+red+cat")
    for name in FOLDS:
        unfold(page, name)
    client = page.context.new_cdp_session(page)
    panel = client.send("Runtime.evaluate", {"expression": f"document.querySelector('{PANEL}')"})["result"]["objectId"]
    nodes = client.send("Accessibility.queryAXTree", {"objectId": panel})["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "").strip()) for n in nodes if not n["ignored"]]
    nameless = [role for role, name in named if role in CONTROLS and not name]
    assert not nameless, nameless

    controls = {name for role, name in named if role in CONTROLS}
    assert {"β", "opacity", "phrase", "show “a striped red key” too"} <= controls
    assert any(name.startswith("binding 9: ") for name in controls), controls

    alts = [name for role, name in named if role in ("image", "img")]
    assert sum(name.startswith("map of “a red cat”, ") for name in alts) == 3, alts
    assert all(alts)
    assert page.get_attribute(".c2lip-live", "aria-live") == "polite"
