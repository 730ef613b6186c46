"""The explorer's state: what is kept, what is refused, and that nothing dies."""

import json
import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from c2lip.core import UserError
from c2lip.lab.attention.controls import CONTROLS, selection_text
from c2lip.lab.attention.explorer import Explorer
from c2lip.lab.attention.maps import MAP_KINDS
from c2lip.lab.attention.panel import Panel
from c2lip.lab.attention.questions import gallery
from c2lip.lab.world.cutouts import open_world
from c2lip.towers import save


@pytest.fixture
def state():
    return Explorer(["base"])


def test_a_gallery_of_cut_outs():
    "Its images, truth and rivals are of that world, and a model of another world has no reason to know them"
    emoji = open_world("cutouts")
    explorer = Explorer(["base"], data="cutouts")
    assert all(e.scene.world is emoji for e in explorer.gallery)
    assert explorer.update(image=9)
    assert explorer.selection.image is explorer.gallery[8]
    assert explorer.shown.outlines[0].any()
    (score,) = explorer.shown.scores[0].values()
    assert score.ranks["nouns"][1] > len(emoji.nouns) - 4
    assert score.ranks["colours"][1] > 6
    assert "never saw such an image" in explorer.status
    assert "never read" in explorer.status

    explorer.menu.of("base").data = "cutouts"
    assert explorer.update(kind="softmax")
    assert "never read" not in explorer.status


@pytest.fixture(scope="module")
def clip_folder(tiny_clip, tmp_path_factory):
    return save(tiny_clip, tmp_path_factory.mktemp("clip") / "model")


def test_a_slider_runs_no_tower(state, monkeypatch):
    for kind in MAP_KINDS:
        assert state.update(kind=kind), state.error

    def never(*a, **k):
        raise AssertionError("a tower ran")

    monkeypatch.setattr("c2lip.lab.attention.maps.encode_images", never)
    monkeypatch.setattr("c2lip.lab.attention.maps.embed_texts", never)
    for wish in ("kind=softmax", "kind=softmax&scale=30", "opacity=0.2&smooth=1", "kind=head", "kind=gradient"):
        assert state.update(state=wish), state.error
    assert not state.update(phrase="a new phrase")
    assert "a tower ran" in state.error


def test_models_of_other_grids(state, clip_folder):
    "Maps and scales of two towers, and the same model under other names"
    assert state.update(model=[str(clip_folder), "base"], phrase="a red mug | a blue mug"), state.error
    assert "resampled to 6×6" in state.status

    shapes = [tuple(column.maps.shape) for column in state.shown.columns]
    assert shapes == [(2, 4, 4), (2, 6, 6), (2, 6, 6)]  # each on its own grid, the difference on the finer

    first, second = [(c.low, c.high) for c in state.shown.columns[:2]]
    assert first != second  # a scale for each model
    assert state.update(same_scale=True)
    assert len({(c.low, c.high) for c in state.shown.columns[:2]}) == 1

    wide = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 200, 3), np.uint8))
    for kind in MAP_KINDS:
        assert state.update(image=wide, kind=kind, phrase="a mug"), state.error
    assert state.update(image=1, kind="gradient"), state.error

    first, last, change = (column.maps.sum() for column in state.shown.columns)
    assert torch.isclose(change, last - first, atol=1e-5)  # a patch of half the area has half of what was added

    for number in (2, 3):
        state.models[f"copy {number}"] = state.models["base"]
    assert state.update(model=list(state.models)[-4:]), state.error
    assert not any(column.signed for column in state.shown.columns)  # of more than two there is no difference
    assert state.file("svg").startswith(b"<?xml")
    assert not state.update(model=["base", str(clip_folder), "copy 2", "copy 3", "/no/such"])


def test_before_and_after_exchanged(state, clip_folder):
    panel = Panel(state)
    panel.controls["model"].value = str(clip_folder)
    name = clip_folder.parent.name
    count = len(state.models)
    assert [menu.value for menu in panel.menus] == ["base", name, "", ""]
    assert panel.controls["model"].value == ""

    panel.menus[0].value = name
    panel.menus[1].value = "base"
    assert state.selection.model == (name, "base")
    assert "resampled" in panel.status.value

    panel.menus[1].value = ""
    assert state.selection.model == (name,)

    panel.controls["model"].value = str(clip_folder.parent)  # known by now, by its run as well
    assert state.selection.model == (name,)
    assert len(state.models) == count


@pytest.mark.parametrize("model, word", [("/no/such/model", "no folder"), ("ViT-B-61", "no model")])
def test_a_refused_model_joins_no_menu(state, model, word):
    before = state.selection
    models = dict(state.models)
    assert not state.update(model=["base", model])
    assert word in state.status
    assert "\n" not in state.status
    assert "unchanged" in state.status
    assert state.selection is before
    assert state.models == models
    assert state.update(smooth=True)
    assert not state.error


def test_a_change_has_the_type_of_its_control(state):
    "Whatever comes as a value, no raw error is shown"
    for name in (*CONTROLS, "name", "question", "state"):
        for value in (None, 1.5, float("nan"), 10**400, -1, "x", "\ud800", "9" * 5000, [], {}, b"x"):
            assert state.update(**{name: value}) or re.match(".*Error: (?!cannot identify)", state.error) is None, name


def test_a_huge_image_is_refused(state, tmp_path):
    Image.new("1", (20_000, 20_000)).save(tmp_path / "huge.png")
    start = time.process_time()
    assert not state.update(image=str(tmp_path / "huge.png"))
    assert "too large" in state.status
    assert time.process_time() - start < 5


def test_odd_words_are_shown_as_they_are(state):
    for phrase in ("a $5 mug", "a_b^c", "ein roter Bär", "狗", "100 % mug", r"$\foo$"):
        assert state.update(phrase=phrase), state.error
        with warnings.catch_warnings(action="error"):
            assert state.file()
    panel = Panel(state)
    panel.controls["phrase"].value = "<script>x</script>"
    for shown in (panel.status.value, panel.maps.value):
        assert "<script>" not in shown
        assert "&lt;script&gt;" in shown


def test_everything_comes_back(state, tmp_path):
    "From the text of a state, and from maps.json"
    Image.new("RGB", (60, 40), "red").save(tmp_path / "mine & yours.png")
    assert state.update(image=str(tmp_path / "mine & yours.png"), caption="a [red] wall?", phrase="a wall | 100 % red")
    assert state.update(kind="softmax", scale=3.5, opacity=0.5, smooth=True, same_scale=True)

    other = Explorer(["base"])
    assert other.update(state=selection_text(state.selection)), other.error
    assert replace(other.selection, image=state.selection.image) == state.selection

    (tmp_path / "maps.png").write_text("mine")
    with pytest.raises(UserError, match="holds maps.png"):
        state.save(str(tmp_path))

    (tmp_path / "maps.png").unlink()
    data = json.loads((state.save(str(tmp_path)) / "maps.json").read_text())
    assert (data["phrase"], data["kind"], data["scale"]) == (["a wall", "100 % red"], "softmax", 3.5)
    assert set(data["scores"]["base"]) == {"a wall", "100 % red"}
    assert data["status"] == state.status
    assert state.update(image=1)
    assert state.update(state=data["state"])
    assert state.status == other.status


def test_the_panel_follows(state):
    panel = Panel(state)
    buttons = panel.chips.children
    other = next(beside for _, beside in panel.chips.pairs.values() if beside.description == "+")
    other.click()
    assert len(state.selection.phrase) == 2
    assert panel.chips.children == buttons  # the same ones: the focus stays

    panel.controls["image"].value = "/no/such.png"
    assert panel.controls["image"].value == "/no/such.png"
    assert "c2lip-wrong" in panel.status.value

    assert state.update(image=Image.new("RGB", (200, 60), "teal"), name="wide.png")  # an upload has no phrase yet
    panel._refresh()
    assert panel.controls["phrase"].value == ""
    assert "type a phrase" in panel.status.value
    assert panel.maps.value.count("<img") == 1

    panel.controls["caption"].value = "A dog beside a red car."
    assert state.selection.phrase == ("a dog",)
    assert list(panel.chips.pairs) == ["a dog", "a red car"]
    assert "never read" in panel.status.value
    assert state.shown.outlines == [None]
    assert "image=" not in panel.state.value  # what was uploaded is on the visitor's machine alone


def test_acts_of_several_threads_keep_their_order(state, monkeypatch):
    "A kernel may bring them so: none waits, each is answered once, and the last one is what the panel shows"
    panel = Panel(state, in_background=True)
    update = state.update
    at_work = []
    overlaps = []

    def slow_update(**changes):
        overlaps.extend(at_work)
        at_work.append(changes)
        time.sleep(0.1)
        try:
            return update(**changes)
        finally:
            at_work.remove(changes)

    monkeypatch.setattr(state, "update", slow_update)
    before = panel.acts.answers
    start = time.time()
    numbers = (7, 7, 2, 12, 4)
    for number in numbers:
        with ThreadPoolExecutor(1) as thread:  # another one for each act
            thread.submit(panel.shelf[number - 1].click).result()
    assert time.time() - start < 0.1 * len(numbers)
    panel.acts.worker.shutdown()
    assert not overlaps
    assert panel.acts.answers == before + len(numbers)
    (chosen,) = [button for button in panel.shelf if button.button_style == "primary"]
    exhibit = gallery()[numbers[-1] - 1]
    assert chosen.description == exhibit.place
    assert state.selection.image is exhibit
    assert f">{exhibit.name}: " in panel.status.value
    assert panel.controls["caption"].value == exhibit.caption
