"""The site: links, exercises, the built pages, and the page that runs two models in Chromium."""

import base64
import io
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import BROWSER, ROOT
from fastcore.test import test_close as close
from PIL import Image

from c2lip.lab.attention.explorer import Explorer
from c2lip.lab.attention.questions import caption_phrases
from c2lip.lab.evaluation.embeddings import embed_images, embed_texts, embed_tokens
from c2lip.lab.world.captions import caption_scene, name_thing
from c2lip.lab.world.drawn import SIZES, Thing, draw_scene, make_scene
from c2lip.score import Score, encode_images, encode_texts, joint_vectors, maxsim, read_vector_head
from c2lip.towers import load

sys.path.insert(0, str(ROOT / "docs"))
import build  # noqa: E402
import exercises  # noqa: E402

PYTHON = ROOT / ".venv" / "site" / "bin" / "python"  # made by `make site`


@contextmanager
def opened(address):
    "A page of Chromium"
    with pytest.importorskip("playwright.sync_api").sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(90_000)  # on a busy machine
        page.goto(address)
        yield page
        browser.close()


def number(text):
    return float(text.replace("−", "-"))


def unpacked(text):
    return torch.tensor(np.frombuffer(base64.b64decode(text), np.float32))


def test_every_exercise_is_solved_by_its_room_and_fails_when_empty():
    "`check_room` runs the room itself before the answers, and raises where that does not pass"
    rooms = exercises.by_room()
    assert sum(map(len, rooms.values())) >= 39
    assert len({room.split("/")[0] for room in rooms}) == 8
    for room, rows in rooms.items():
        notebook = exercises.exercise_notebook(room, rows)  # as a student gets it
        checked = exercises.check_room(room, rows, exercises.answers(notebook))
        checked = {row["function"]: wrong for row, wrong in checked}
        assert set(checked) == {row["function"] for row in rows} and all(checked.values()), f"{room}: {checked}"


def test_a_naive_version_fails_its_exercise():
    "What a room shows before its better version is no answer"
    tried = []
    for room, rows in exercises.by_room().items():
        cells = exercises.read_room(room)["cells"]
        for row in rows:
            naive = next(
                cell for cell in cells if f"def {row['function']}(" in cell["source"] or cell["id"] == row["cell"]
            )
            if naive["id"] == row["cell"]:
                continue
            [(_, wrong)] = exercises.check_room(room, [row], {row["cell"]: naive["source"]})
            assert wrong, row["function"]
            tried.append(row["function"])
    assert tried == ["project_tokens", "concept_similarity", "sigmoid_loss"]


def test_a_student_solves_an_exercise(tmp_path, monkeypatch):
    row = next(row for row in exercises.rows() if row["function"] == "owner_signs")
    monkeypatch.setattr(exercises, "rows", lambda: [row])
    exercises.make(tmp_path)
    file = tmp_path / "1_method/04_losses.ipynb"
    notebook = json.loads(file.read_text())

    for passed, body in enumerate(("return None", "return 2.0 * (torch.arange(n)[:, None] == owner) - 1")):
        text = json.dumps(notebook).replace(exercises.EMPTY, body)
        file.write_text(text)
        exercises.make(tmp_path)  # leaves it as it is
        assert file.read_text() == text
        with pytest.raises(SystemExit) as ended:
            exercises.check(tmp_path)
        assert ended.value.code == (not passed)


def test_no_link_is_dead(tmp_path):
    "In the source of every page; each chapter has its link to the glossary"
    site = build.write_source(tmp_path)
    assert not site.dead
    assert site.links > 150
    assert not [c for c in site.chapters if "(../glossary.md)" not in (tmp_path / c / "index.md").read_text()]


def test_colab_is_one_setting(tmp_path, monkeypatch):
    "Without an address no page has the link"
    for address, linked in ("", False), ("https://github.com/someone/a_fork.git", True):
        monkeypatch.setattr(build, "settings", lambda address=address: {"git_url": address})
        build.Site(tmp_path).notebook(build.NBS / "tour.ipynb")
        page = (tmp_path / "tour.ipynb").read_text()
        assert ("/github/someone/a_fork/blob/main/nbs/tour.ipynb" in page) == linked == ("colab" in page)


@pytest.mark.timeout(400)
@pytest.mark.skipif(not PYTHON.exists(), reason="the site's own environment is missing: make site")
def test_built_site(tmp_path, run):
    "A chapter: the build refuses a dead link, a warning, and a file of another host; search answers from a file"
    done = run(PYTHON, ROOT / "docs" / "build.py", tmp_path, "1_method", timeout=390)
    assert done.returncode == 0, done.out

    home = tmp_path / "html"
    pages = ("1_method/index.html", "1_method/04_losses.html", "reference/c2lip.losses.html")
    text = "".join((home / page).read_text() for page in pages)
    assert 'src="maps.html"' in (home / "index.html").read_text().partition("<h1>")[2].partition("<h2")[0]
    assert all(part in text for part in ("<math", "<details>", "03_pooling.html", "captions of all ranks"))

    (home / "bad.html").write_text('<a href="maps.html">x</a><a href="index.html#none">x</a><a href="none.html">x</a>')
    assert len(build.dead_links(home)) == 2

    if BROWSER:
        with opened(f"file://{home}/search.html?q=owner_signs") as page:
            page.locator("#search-results li a", has_text="Losses").first.wait_for()


ASK = """([texts, images]) => {
    const bytes = text => Uint8ClampedArray.from(atob(text), c => c.charCodeAt(0));
    const pack = list => btoa(Array.from(new Uint8Array(list.buffer), b => String.fromCharCode(b)).join(''));
    const all = lists => pack(Float32Array.from(lists.flatMap(list => [...list])));
    const seen = m => images.map(image => c2lip.view(m, bytes(image))).map(v => [...v.image, ...v.tokens]);
    return [0, 1].map(m => [all(texts.map(text => c2lip.embed(m, text))), all(seen(m))]);
}"""
SHOWN = """() => {
    const all = (e, query) => [...e.querySelectorAll(query)];
    const figure = f => [f.querySelector('figcaption').innerText, f.querySelector('canvas').getAttribute('aria-label'),
        all(f, '.c2lip-ends span, .c2lip-lines span').map(e => e.textContent)];
    return [document.getElementById('status').innerText, all(document, '#maps figure').map(figure),
        all(document, '#maps section:first-child canvas[role=img]').map(c => c.toDataURL().slice(22))];
}"""
TABLE = """() => [...document.querySelectorAll('#scores tbody')].map(
    body => [...body.querySelectorAll('th, td')].map(cell => cell.innerText))"""
CAPTION = (
    "A white car can be seen sticking out of a pink hat. Nearby there is a white kite. Nearby there is a yellow house."
)
SWAPPED = CAPTION.replace("white", "blue").replace("pink", "white").replace("blue", "pink")
FOUR = "a purple key | a red fish | a purple fish | a striped red key"
ACTS = (  # what is done on the page, and the same in the explorer
    ("click", "summary", {}),
    ("fill", "#phrase", FOUR, dict(phrase=FOUR)),
    ("click", "text=without attribute", dict(question="without attribute")),  # with four on show
    ("press", "#chips span:nth-child(4) button", "Enter", dict(phrase="a striped red key")),
    ("click", "text=centred", dict(kind="centred")),
    ("uncheck", "#map-smooth", dict(smooth=False)),
    ("click", "text=similarity", dict(kind="similarity")),
    ("press", "#map-opacity", "ArrowLeft", dict(opacity=0.7)),
    ("uncheck", "#map-same_scale", dict(same_scale=False)),
    ("click", "text=pooling head", dict(kind="head")),
    ("press", "text=swap colours", "Space", dict(question="swap colours")),
    ("press", "#scenes button:nth-child(3)", "Enter", dict(image=3)),
    ("press", "[title='show “a white kite” too']", "Enter", dict(phrase="a white car | a white kite")),
    ("click", "text=without attribute", dict(question="without attribute")),
    ("click", "text=without attribute", dict(question="without attribute")),
    ("fill", "#phrase", "a shy dragon on a mug | the dog", dict(phrase="a shy dragon on a mug | the dog")),
    ("click", "text=swap nouns", dict(question="swap nouns")),
    ("fill", "#phrase", "a|b|c|d|e", dict(phrase="a|b|c|d|e")),
)


def check_scores(page, image, least):
    "The rows of the page's table are the two scores of both models, within `least`; whether each prefers the first row"
    page.wait_for_timeout(500)
    rows = page.evaluate(TABLE)
    texts = [text for text, *_ in rows]
    shown = torch.tensor([[number(cell) for cell in cells] for _, *cells in rows])
    scores = [Score.load(load(model), name) for model in ("base", "tuned") for name in ("v·t", "phrases")]
    close(shown, torch.cat([score.of([image], texts) for score in scores]).T, least)
    return texts, (shown[0] > shown[-1]).tolist()


def test_a_models_name_stays_in_the_pages_data(tmp_path, monkeypatch):
    import page as writer

    names = ["<!--<script>", "</script>\\", "\u2028&'\""]
    monkeypatch.setattr(writer, "data", lambda *models: dict(names=names))
    writer.write_page(tmp_path / "maps.html")
    held = (tmp_path / "maps.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(held)["names"] == names
    assert "<" not in held


def test_the_page_of_the_clone_is_fresh(maps):
    "docs/maps.html is what docs/page.py writes, but for the last bits of numbers"

    def parts(text):
        "The page without its data, and its data"
        before, _, rest = text.partition('id="data">')
        data, _, after = rest.partition("</script>")
        return before + after, json.loads(data)

    text, held = parts(build.PAGE.read_text(encoding="utf8"))
    fresh_text, fresh = parts(Path(maps.removeprefix("file://")).read_text(encoding="utf8"))
    assert text == fresh_text, "make pictures writes it anew"
    models = [page.pop("models") + page.pop("heads")[1:] for page in (held, fresh)]  # the base has no head
    for stored, made in zip(*models, strict=True):
        stored, made = (safetensors.torch.load(base64.b64decode(model)) for model in (stored, made))
        assert stored.keys() == made.keys()
        assert all(torch.allclose(stored[name], made[name], atol=1e-4, rtol=1e-3) for name in stored)
    close(np.ravel(held.pop("weights")), np.ravel(fresh.pop("weights")), 1e-5)
    assert held == fresh, "make pictures writes it anew"
    assert build.PAGE.stat().st_size < 7e6


@pytest.fixture(scope="module")
def maps(tmp_path_factory):
    "The address of the page"
    import page as writer

    file = tmp_path_factory.mktemp("page") / "maps.html"
    writer.write_page(file)
    return f"file://{file}"


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_scene_is_arranged(maps):
    "By mouse and keyboard; it is drawn as Python draws it, with a caption and its swap"
    import page as writer

    scene = writer.scenes()[18].scene  # of two nouns in two colours
    first, second, third, fourth = scene.things
    assert first.noun == fourth.noun
    assert first.colour != fourth.colour
    moved = replace(first, colour=fourth.colour, x=first.x + 1 / 24)
    new = Thing("boot", "blue", "striped", "large", side=SIZES["large"])
    things = (moved, second, third, new)
    with opened(maps) as page:
        page.wait_for_function("c2lip.ready > 0")
        page.click("#scenes button:nth-child(19)")
        page.locator("#status", has_text="held out 19").wait_for()
        page.press("#handles button:nth-child(1)", "ArrowRight")
        page.press("#exchange", "Enter")
        page.press("#handles button:nth-child(4)", "Delete")
        page.press("#add", "Enter")
        for name, value in (("noun", "boot"), ("pattern", "striped"), ("size", "large")):
            page.select_option(f"#{name}", value)
        page.press(".swatch[value=blue]", "Space")
        start, end = (page.locator(at).bounding_box() for at in ("#handles button:nth-child(4)", "#stage"))
        page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
        page.mouse.down()
        page.mouse.move(end["x"] + end["width"] / 2, end["y"] + end["height"] / 2)
        page.mouse.up()
        caption = "{}, {}, {} and {}".format(*(name_thing(thing, pattern=True) for thing in things))
        page.wait_for_function("text => document.getElementById('caption').value == text", arg=caption)
        page.locator("#status", has_text="your scene").wait_for()
        page.wait_for_timeout(500)
        drawn = page.evaluate("document.getElementById('stage').toDataURL().slice(22)")
        wanted = replace(scene, things=things, contact="")
        texts, first = check_scores(page, draw_scene(wanted), 0.03)
        words = page.inner_text("#verdict")

    drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(drawn))).convert("RGB"), float)
    assert np.abs(drawn - np.asarray(draw_scene(wanted, 384), float)).mean() < 1
    assert texts[0] == caption
    assert len(texts) == 2
    assert (words.count("✓"), words.count("✗")) == (sum(first), 4 - sum(first))


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_accessible_and_fits(maps, theme):
    "At three widths axe-core finds nothing serious, and nothing lies beside the page"
    package = pytest.importorskip("axe_playwright_python", reason="axe-core: pip install axe-playwright-python")
    axe = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf8")

    with opened(f"{maps}?theme={theme}") as page:
        page.wait_for_function("c2lip.ready > 0")
        assert page.locator(".steps li").count() == 3
        page.evaluate(axe)
        for width in (1400, 800, 400):
            page.set_viewport_size(dict(width=width, height=900))
            assert page.evaluate("document.documentElement.scrollWidth") == width
            violations = page.evaluate("axe.run()")["violations"]
            assert not [(v["id"], v["nodes"][0]["html"]) for v in violations if v["impact"] in ("serious", "critical")]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_answers_as_the_notebook_does(maps, tmp_path):
    "30 captions and 20 scenes within 1e-4 of PyTorch; what it shows and says is what the explorer shows and says"
    import page as writer

    explorer = Explorer(["base", "tuned"])
    scenes = writer.scenes()
    explorer.update(state="kind=softmax&smooth=1&same_scale=1", phrase=caption_phrases(scenes[0].caption)[0])
    texts = [e.caption for e in scenes] + ["Ünïcode &amp; “A—mug”, 42!"]
    texts += [caption_scene(make_scene("validation", i), "page", i) for i in range(9)]
    images = [draw_scene(make_scene("validation", i)) for i in range(20)]
    with opened(maps) as page:
        page.wait_for_function("c2lip.ready > 0")
        packed = [base64.b64encode(np.asarray(image).tobytes()).decode() for image in images]
        for name, (words, seen) in zip(("base", "tuned"), page.evaluate(ASK, [texts, packed])):
            own = explorer.menu.of(name).towers
            close(unpacked(words), embed_texts(own, texts, progress=False).flatten(), 1e-4)
            whole = embed_images(own, images, progress=False)[:, None]
            wanted = torch.cat([whole, embed_tokens(own, images, progress=False)[1]], 1)
            close(unpacked(seen), wanted.flatten(), 1e-4)
        for act, *args, changes in ACTS:
            getattr(page, act)(*args)
            if act == "fill":
                page.press("#phrase", "Enter")
            explorer.update(**changes)
            status, figures, painted = page.evaluate(SHOWN)
            shown = explorer.shown
            wanted = []
            panels = [shown.panels(i) for i in range(len(shown.titles))]
            for i, (c, _, words) in [(i, panel) for i, row in enumerate(panels) for panel in row]:
                bar = [c.ticks[0], c.label, c.ticks[-1], *c.lines[i]] if c else []
                wanted.append([c.name if c else "image", words, bar])
            assert (status, figures) == (explorer.status, wanted), args
            for (_, pixels, _), values in zip(panels[0], painted, strict=True):
                other = np.asarray(Image.open(io.BytesIO(base64.b64decode(values))).convert("RGB"), float)
                assert np.abs(other - np.floor(pixels * 255 + 0.5)).max() <= 2
        assert check_scores(page, scenes[2].image, 6e-4)[0] == [CAPTION, SWAPPED]
        page.fill("#phrase", "a red kite")  # and no Enter
        page.locator("#maps.stale").wait_for(state="attached")
        page.locator("#maps:not(.stale) .c2lip-phrase", has_text="a red kite").wait_for()
        page.fill("#caption", "nothing at all")  # a caption without a phrase is its own
        page.press("#caption", "Enter")
        assert check_scores(page, scenes[2].image, 6e-4)[0] == ["nothing at all"]
        (tmp_path / "none.png").write_text("no image")
        page.set_input_files("#own", tmp_path / "none.png")
        page.locator("#status", has_text="the image cannot be opened").wait_for()


FOUND = """() => ['by-vt', 'by-phrases', 'by-vector'].map(list =>
    [...document.querySelectorAll(`#${list} li`)].map(e => [e.title, e.querySelector('b').textContent, e.className]))"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_searches_as_maxsim_does(maps, tmp_path):
    "Every order of sixty scenes, by both models; the right ones are marked; narrow pages and frames hold them"
    import page as writer

    (tmp_path / "frame.html").write_text(f'<iframe sandbox="allow-scripts" src="{maps}">')
    with opened(f"file://{tmp_path}/frame.html") as page:
        frame = page.frame_locator("iframe")
        frame.locator("#query").fill(" ")
        frame.locator("#query").press("Enter")
        frame.locator("#found-status", has_text="the search is empty").wait_for()

    scenes = [*writer.scenes(), *writer.searched()]
    named = {name: {(thing.noun, thing.colour) for thing in scene.scene.things} for name, scene in enumerate(scenes)}
    with opened(maps) as page:
        page.wait_for_function("c2lip.ready > 0")
        count = 0
        for model, name in reversed([*enumerate(("base", "tuned"))]):
            towers = load(name)
            images = encode_images(towers, [scene.image for scene in scenes])
            for text, pairs in writer.SEARCHES.items():
                page.fill("#query", text)
                page.click(f"#search-models button:nth-child({model + 1})")
                count += 1
                page.locator(f"#found[data-asked='{count}']").wait_for(state="attached")
                orders = [maxsim(encode_texts(towers, [text], share), images)[0] for share in (0, None)]
                if head := read_vector_head(towers):
                    texts = joint_vectors(encode_texts(towers, [text]), head, texts=True)
                    orders.append((texts @ joint_vectors(images, head).T)[0].numpy())
                for scores, hits in zip(orders, filter(None, page.evaluate(FOUND)), strict=True):
                    best = np.argsort(-scores)[:10]
                    assert [title for title, *_ in hits] == [scenes[i].name for i in best]
                    close([number(value) for _, value, _ in hits], scores[best], 6e-4)
                    assert [kind == "right" for *_, kind in hits] == [named[i] >= {*pairs} for i in best]
        page.set_viewport_size(dict(width=400, height=900))
        assert page.evaluate("document.documentElement.scrollWidth") == 400
