"""The explorer as a person uses it: JupyterLab in Chromium, driven by Playwright. Skipped where either is missing."""
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest

from conftest import ROOT

BROWSER = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")) if p), None)
playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs: pip install playwright")
pytestmark = [pytest.mark.skipif(BROWSER is None, reason="the browser test needs Chromium: apt-get install --no-install-recommends chromium"), pytest.mark.timeout(900)]

STATUS, FIGURE = ".c2lip-status", "img.c2lip-figure"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    "A release folder with other weights than the base's"
    import torch
    from c2lip import release, towers
    model = towers.load("base"); torch.manual_seed(0)
    with torch.no_grad():
        for p in model.model.parameters(): p.add_(.05*p.std(correction=0)*torch.randn_like(p)) if p.ndim > 1 else None
    return release.save(model, tmp_path_factory.mktemp("tuned")/"model", dict(note="noise for a test"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "A JupyterLab of our own with a copy of explore.ipynb: (address, token)"
    home = tmp_path_factory.mktemp("lab")
    shutil.copy(ROOT/"nbs"/"explore.ipynb", home)
    (home/"config"/"labconfig").mkdir(parents=True)
    (home/"config"/"labconfig"/"page_config.json").write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    token = secrets.token_hex(8)
    env = os.environ | dict(JUPYTER_CONFIG_DIR=str(home/"config"), JUPYTER_DATA_DIR=str(home/"share"), JUPYTER_RUNTIME_DIR=str(home/"run"), HOME=str(home),
                            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), OMP_NUM_THREADS="1")
    with open(home/"log", "w") as log:
        server = subprocess.Popen(["jupyter-lab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", f"--IdentityProvider.token={token}",
                                   f"--ServerApp.root_dir={home}", "--allow-root"], env=env, stdout=log, stderr=log, cwd=home)
        try:
            for _ in range(240):
                try: urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status?token={token}", timeout=2); break
                except OSError: time.sleep(.25)
                assert server.poll() is None, (home/"log").read_text()[-2000:]
            yield f"http://127.0.0.1:{port}", token
        finally:
            server.terminate()
            try: server.wait(20)
            except subprocess.TimeoutExpired: server.kill()


def sessions(address, token):
    return json.load(urllib.request.urlopen(f"{address}/api/sessions?token={token}"))


@pytest.fixture(scope="module")
def page(lab):
    "The notebook in a browser, all cells run"
    address, token = lab
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport=dict(width=1280, height=1000))
        page.set_default_timeout(120_000)
        page.goto(f"{address}/lab/tree/explore.ipynb?token={token}&reset")
        page.wait_for_selector(".jp-Notebook")
        deadline = time.time() + 120       # Run All before the kernel is connected is dropped without a word
        while not any(s["kernel"]["execution_state"] == "idle" and s["kernel"]["connections"] for s in sessions(address, token)):
            assert time.time() < deadline, "no kernel"
            time.sleep(.3)
        page.wait_for_function("/\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.textContent)")
        page.keyboard.press("Control+B")   # the file browser makes room
        page.click('.lm-MenuBar-itemLabel:text-is("Run")'); page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
        try: page.wait_for_selector(STATUS, timeout=240_000); page.wait_for_selector(FIGURE)
        except playwright.TimeoutError:
            (ROOT/"_proc").mkdir(exist_ok=True); page.screenshot(path=str(ROOT/"_proc"/"explorer-failed.png"))
            raise AssertionError("the explorer did not appear; see _proc/explorer-failed.png") from None
        yield page
        browser.close()


def after(page, act):
    "Do `act`; (the new status, seconds until status and figure were there)"
    say, draw = page.inner_text(STATUS), page.get_attribute(FIGURE, "src")
    start = time.time(); act()
    page.wait_for_function("([s, say, f, draw]) => document.querySelector(s).innerText != say && document.querySelector(f).src != draw", arg=[STATUS, say, FIGURE, draw], polling=20)
    return page.inner_text(STATUS), time.time() - start


def upload(page, file):
    with page.expect_file_chooser() as chooser: page.click(".c2lip-explorer .widget-upload")
    chooser.value.set_files(str(file))


def picture(page, name, width, height=1500):
    "A screenshot kept as an artefact"
    (ROOT/"_proc").mkdir(exist_ok=True)
    page.set_viewport_size(dict(width=width, height=height)); page.wait_for_timeout(600)
    page.evaluate(f"document.querySelector('.c2lip-explorer').scrollIntoView()"); page.wait_for_timeout(900)
    page.screenshot(path=str(ROOT/"_proc"/f"{name}.png"))


def test_a_visit(page, tuned, tmp_path):
    took = {}
    say = page.inner_text(STATUS)
    assert "“" in say and "v·c" in say
    # a chip
    chip = page.locator(".c2lip-chips button:not(.mod-primary)", has_text="a ").first
    wanted = chip.inner_text()
    say, took["chip"] = after(page, chip.click)
    assert f"“{wanted}”" in say
    # another model, typed
    field = page.get_by_placeholder("another “after”")
    say, took["model"] = after(page, lambda: (field.fill(str(tuned)), field.press("Enter")))
    assert str(tuned) in say and "→" in say
    # a map kind, and the slider by keyboard alone
    say, took["kind"] = after(page, page.get_by_role("button", name="softmax", exact=True).click)
    assert "β = 10" in say
    handle = page.locator(".c2lip-explorer .noUi-handle").first
    handle.focus()
    say, took["slider"] = after(page, lambda: page.keyboard.press("ArrowRight"))
    assert "β = 11.2" in say
    # two phrases
    field = page.get_by_placeholder("a red mug | a blue mug")
    say, took["phrases"] = after(page, lambda: (field.fill("a red mug | a blue mug"), field.press("Enter")))
    assert "“a red mug”" in say and "“a blue mug”" in say
    # another picture, with the keyboard
    third = page.locator(".c2lip-shelf button").nth(2)
    third.focus()
    say, took["scene"] = after(page, lambda: page.keyboard.press("Space"))
    assert say.startswith("scene 3")
    assert page.locator(".c2lip-shelf button.mod-primary").inner_text() == "3"
    # what is broken is said, and the picture stays
    broken = tmp_path/"broken.png"; broken.write_bytes(b"\x89PNG\r\n\x1a\n but no more")
    draw = page.get_attribute(FIGURE, "src")
    upload(page, broken)
    page.wait_for_selector(".c2lip-wrong")
    assert "broken.png" in page.inner_text(STATUS) and "scene 3" in page.inner_text(STATUS)
    page.get_by_placeholder("or the path of a picture").fill("/no/such/picture.png"); page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.c2lip-status').innerText.includes('/no/such')")
    # and a good one of one's own afterwards
    from PIL import Image
    Image.linear_gradient("L").resize((300, 200)).convert("RGB").save(tmp_path/"mine.png")
    say, took["upload"] = after(page, lambda: upload(page, tmp_path/"mine.png"))
    assert say.startswith("mine.png") and not page.locator(".c2lip-wrong").count()
    assert page.get_attribute(FIGURE, "src") != draw
    print("\nseconds from act to figure:", {k: round(v, 2) for k, v in took.items()})
    assert not page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count()


def test_it_fits_the_page(page):
    "Nothing stands out on the right, at either width; the screenshots are for looking at"
    after(page, page.locator(".c2lip-shelf button").nth(8).click)
    for width in (1280, 900):
        picture(page, f"explorer-{width}", width)
        over = page.evaluate("""() => { const box = document.querySelector('.c2lip-explorer').getBoundingClientRect();
            return [...document.querySelectorAll('.c2lip-explorer *')].filter(e => e.offsetWidth && e.getBoundingClientRect().right > box.right + 2 && !e.closest('.noUi-target')).map(e => e.className) }""")
        assert not over, over
        assert page.evaluate("document.querySelector('img.c2lip-figure').getBoundingClientRect().width") > 500
