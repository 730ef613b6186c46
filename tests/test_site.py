"""The site: links, exercises, the built pages, and the page that runs two models in Chromium."""

import base64
import json
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import BROWSER, ROOT
from fastcore.test import test_close as close

from c2lip.attention.figures import ImageMaps, map_columns
from c2lip.attention.maps import embed_phrases, encode_view
from c2lip.attention.questions import caption_phrases
from c2lip.core.files import shipped
from c2lip.evaluation.embeddings import embed_texts
from c2lip.towers import load
from c2lip.world import draw_scene, make_scene
from c2lip.world_captions import caption_scene

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
        page.goto(address)
        yield page
        browser.close()


def packed(image):
    return base64.b64encode(np.asarray(image).tobytes()).decode()


def unpacked(text, kind):
    return torch.tensor(np.frombuffer(base64.b64decode(text), kind))


def test_every_exercise_is_solved_by_its_room_and_fails_when_empty():
    "`check_room` runs the room's own body after each answer, and raises where that does not pass"
    found = exercises.by_room()
    assert sum(map(len, found.values())) >= 40 and len({room.split("/")[0] for room in found}) == 9
    for room, rows in found.items():
        notebook = exercises.exercise_notebook(room, rows)  # as a student gets it
        checked = exercises.check_room(room, rows, exercises.answers(notebook))
        checked = {row["function"]: wrong for row, wrong in checked}
        assert set(checked) == {row["function"] for row in rows} and all(checked.values()), f"{room}: {checked}"


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
    "In the source of every page"
    source = tmp_path / "source"
    source.mkdir()
    site = build.write_source(source)
    assert not site.dead and site.links > 150


@pytest.mark.timeout(400)
@pytest.mark.skipif(not PYTHON.exists(), reason="the site's own environment is missing: make site")
def test_built_site(tmp_path, run):
    "The build refuses a dead link, a warning, and a file of another host; search answers from a file"
    done = run(PYTHON, ROOT / "docs" / "build.py", tmp_path, timeout=390)
    assert done.returncode == 0, done.out
    home = tmp_path / "html"
    pages = ("1_method/index.html", "1_method/04_losses.html", "reference/c2lip.losses.html")
    text = "".join((home / page).read_text() for page in pages)
    assert all(part in text for part in ("<math", "<details>", "03_pooling.html", "captions of all ranks"))
    (home / "bad.html").write_text('<a href="maps.html">x</a><a href="index.html#none">x</a><a href="none.html">x</a>')
    assert len(build.dead_links(home)) == 2
    if BROWSER:
        with opened(f"file://{home}/search.html?q=owner_signs") as page:
            page.locator("#search-results li a", has_text="Losses").first.wait_for()


ASK = """([texts, images, shown, phrase]) => {
    const bytes = text => Uint8ClampedArray.from(atob(text), c => c.charCodeAt(0));
    const pack = list => btoa(Array.from(new Uint8Array(list.buffer), b => String.fromCharCode(b)).join(''));
    const all = lists => pack(Float32Array.from(lists.flatMap(list => [...list])));
    const seen = [0, 1].map(m => images.map(image => c2lip.view(m, bytes(image))));
    const maps = seen.map((views, m) => c2lip.map(views[0], c2lip.embed(m, phrase)));
    return {
        texts: [0, 1].map(m => all(texts.map(text => c2lip.embed(m, text)))),
        images: seen.map(views => all(views.map(v => [...v.image, ...v.tokens]))),
        painted: c2lip.columns(...maps).map(column => pack(c2lip.paint(bytes(shown), column))),
        phrases: c2lip.D.scenes.map(scene => c2lip.phrasesOf(scene.caption)),
        swapped: ['A red mug and an orange key', 'a mug'].map(c2lip.swapped),
    };
}"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_answers_as_the_notebook_does(tmp_path):
    "200 captions and scenes within 1e-4 of PyTorch; phrases and painted maps as the library's; wrong input in one line"
    import page as writer

    writer.write_page(tmp_path / "maps.html")
    scenes, towers, phrase = writer.scenes(), [load("base"), load(str(shipped("tuned")))], ["a pink key"]
    texts = [e.caption for e in scenes] + ["Ünïcode &amp; “A—mug”, 42!"]
    texts += [caption_scene(make_scene("validation", i), "page", i) for i in range(179)]
    images = [draw_scene(make_scene("validation", i)) for i in range(200)]
    shown = images[0].resize((384, 384))
    with opened(f"file://{tmp_path}/maps.html") as page:
        page.wait_for_function("c2lip.ready > 0")
        found = page.evaluate(ASK, [texts, [*map(packed, images)], packed(shown.convert("RGBA")), phrase[0]])
        seen = []
        for m, own in enumerate(towers):
            close(unpacked(found["texts"][m], np.float32), embed_texts(own, texts, progress=False).flatten(), 1e-4)
            seen.append([encode_view(own, image) for image in images])
            wanted = torch.cat([torch.cat([v.image[None], v.tokens]).flatten() for v in seen[m]])
            close(unpacked(found["images"][m], np.float32), wanted, 1e-4)
        maps = [views[0].maps(embed_phrases(own, phrase), "centred") for views, own in zip(seen, towers)]
        columns = map_columns("ab", maps, [views[0].field for views in seen], "centred")
        panels = ImageMaps(shown, columns, phrase).panels(0)[1:]
        for (_, pixels, _), values in zip(panels, found["painted"], strict=True):
            other = unpacked(values, np.uint8).reshape(384, 384, 4)[..., :3].numpy().astype(float)
            assert np.abs(other - np.floor(pixels * 255 + 0.5)).max() <= 1
        assert found["phrases"] == [list(caption_phrases(e.caption)) for e in scenes]
        assert found["swapped"] == ["An orange mug and a red key", None]
        for text, said in (("a blue fish | a red mug", "“a red mug”"), ("a|b|c|d|e", "at most four phrases")):
            page.fill("#phrase", text)
            page.press("#phrase", "Enter")
            assert page.locator("#maps canvas[role=img]").count() == 8 and said in page.inner_text("#status")
        page.set_input_files("#own", tmp_path / "maps.html")
        page.locator("#status", has_text="the image cannot be opened").wait_for()
