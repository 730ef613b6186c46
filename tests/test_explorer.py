"""The explorer's state: what is kept, what is refused, and that nothing dies."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from c2lip.attention.controls import selection_text
from c2lip.attention.explorer import Explorer
from c2lip.attention.gallery import gallery
from c2lip.attention.maps import MAP_KINDS
from c2lip.attention.panel import Panel
from c2lip.base import BASE_CONFIG
from c2lip.core import UserError
from c2lip.release import save
from c2lip.towers import Towers, load
from c2lip.world_captions import name_thing


@pytest.fixture
def state():
    return Explorer(["base"])


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    "A release of a tiny CLIP with the base's tokenizer: other grid, class token, middle crop"
    torch.manual_seed(0)
    config = dict(
        embed_dim=64,
        vision_cfg=dict(image_size=64, patch_size=16, width=64, layers=2, head_width=32),
        text_cfg=dict(BASE_CONFIG["text_cfg"], hf_tokenizer_name="c2lip-base"),
        custom_text=True,
    )
    model = open_clip.model.CustomTextCLIP(**{k: v for k, v in config.items() if k != "custom_text"})
    cfg = dict(size=64, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), interpolation="bicubic", resize_mode="shortest")
    return save(Towers(model, load("base").tokenizer, config, cfg, "tiny"), tmp_path_factory.mktemp("clip") / "model")


def test_a_slider_runs_no_tower(state, monkeypatch):
    for kind in MAP_KINDS:
        assert state.update(kind=kind), state.error

    def never(*a, **k):
        raise AssertionError("a tower was asked")

    monkeypatch.setattr("c2lip.attention.maps.encode_images", never)
    monkeypatch.setattr("c2lip.attention.maps.embed_texts", never)
    for wish in ("kind=softmax", "kind=softmax&scale=30", "opacity=0.2&smooth=1", "kind=head", "kind=similarity"):
        assert state.update(state=wish), state.error
    assert not state.update(phrase="a new phrase") and "asked" in state.error


def test_a_model_of_another_grid(state, clip_folder):
    assert state.update(model=[str(clip_folder), "base"], phrase="a red mug | a blue mug"), state.error
    assert "resampled to 6×6" in state.status
    shapes = [tuple(column.maps.shape) for column in state.shown.columns]
    assert shapes == [(2, 4, 4), (2, 6, 6), (2, 6, 6)]  # each on its own grid, the difference on the finer
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 200, 3), np.uint8))
    for kind in MAP_KINDS:
        assert state.update(image=wide, kind=kind), state.error
    assert len(state.file()) > 5000


def test_before_and_after_exchanged(state, clip_folder):
    panel = Panel(state)
    panel.controls["models"].value = str(clip_folder)
    name, count = clip_folder.parent.name, len(state.models)
    assert [menu.value for menu in panel.menus] == ["base", name, "", ""]
    assert panel.controls["models"].value == ""
    panel.swap.click()
    assert state.selection.models == (name, "base") and "resampled" in panel.status.value
    panel.menus[1].value = ""
    assert state.selection.models == (name,) and panel.swap.disabled and "one model" in panel.status.value
    panel.controls["models"].value = str(clip_folder.parent)  # known by now, by its run as well
    assert state.selection.models == (name,) and len(state.models) == count
    panel.controls["models"].value = "base"
    assert panel.menus[1].value == "base" and list(state.models).count(name) == 1


@pytest.mark.parametrize(
    "wish, word",
    [
        (dict(phrase="a|b|c|d|e"), "at most four"),
        (dict(model=["/no/such/model"]), "no folder"),
        (dict(model=["base", "ViT-B-61"]), "no model"),
        (dict(image=b"", name="empty.png"), "empty.png"),
        (dict(question="without attribute", phrase="a mug"), "nothing to change"),
        (dict(state="model=base&scale=many"), "no number"),
    ],
)
def test_refusals(state, wish, word):
    before, models = state.selection, dict(state.models)
    assert not state.update(**wish) and word in state.status and "\n" not in state.status
    assert "unchanged" in state.status and state.selection is before and state.models == models
    assert state.update(smooth=True) and not state.error
    if "model" in wish:
        with pytest.raises(UserError, match=word):
            Explorer(wish["model"])


def test_a_huge_image_is_refused(state, tmp_path):
    Image.new("1", (20_000, 20_000)).save(tmp_path / "huge.png")
    start = time.process_time()
    assert not state.update(image=str(tmp_path / "huge.png"))
    assert "too large" in state.status
    assert time.process_time() - start < 5


def test_odd_words_are_shown_as_they_are(state):
    for phrase in ("a $5 mug", "<b>mug</b> & hat", "a_b^c", "ein roter Bär", "狗", "100 % mug"):
        assert state.update(phrase=phrase), state.error
        assert state.file()
    panel = Panel(state)
    panel.controls["phrases"].value = "<script>x</script>"
    assert "<script>" not in panel.status.value and "&lt;script&gt;" in panel.status.value
    assert "<script>" not in panel.maps.value and "&lt;script&gt;" in panel.maps.value


def test_saved_files_say_what_they_show(state, tmp_path):
    assert state.update(phrase="a red mug", kind="softmax", scale=5.0)
    data = json.loads((state.save(str(tmp_path)) / "maps.json").read_text())
    assert (data["phrases"], data["kind"], data["scale"]) == (["a red mug"], "softmax", 5)
    assert data["scores"]["base"]["a red mug"]["ranks"]["colours"][1] == 8
    other = Explorer(["base"])
    assert other.update(state=data["state"]) and other.status == state.status


def test_the_panel_follows(state):
    panel = Panel(state)
    buttons, plus = panel.chip_row.children, next(b for _, b in panel.chips.values() if b.description == "+")
    plus.click()
    assert len(state.selection.phrases) == 2 and plus.description == "−"
    plus.click()
    assert len(state.selection.phrases) == 1 and plus.description == "+"
    assert panel.chip_row.children == buttons  # the same ones: the focus stays
    panel.controls["caption"].value = "A yellow boat stands over a pink hat."
    assert state.selection.phrases == ("a yellow boat",) and list(panel.chips) == ["a yellow boat", "a pink hat"]
    assert [b.layout.display for _, b in panel.chips.values()] == ["none", None]
    assert panel.chips["a pink hat"][1].description == "+"
    panel.controls["image"].value = "/no/such.png"
    assert panel.controls["image"].value == "/no/such.png" and "c2lip-wrong" in panel.status.value


def test_acts_of_several_threads_keep_their_order(state, monkeypatch):
    "A kernel may bring them so: none waits, each is answered once, and the last one is what the panel shows"
    panel, update, at_work, overlaps = Panel(state, in_background=True), state.update, [], []

    def slow_update(**changes):
        overlaps.extend(at_work)
        at_work.append(changes)
        time.sleep(0.02)
        try:
            return update(**changes)
        finally:
            at_work.remove(changes)

    monkeypatch.setattr(state, "update", slow_update)
    before, start, numbers = panel._answers, time.time(), (7, 7, 2, 12, 1, 9, 4)
    for number in numbers:
        with ThreadPoolExecutor(1) as thread:  # another one for each act
            thread.submit(panel.shelf[number - 1].click).result()
    assert time.time() - start < 0.02 * len(numbers)
    panel._worker.shutdown()
    assert not overlaps and panel._answers == before + len(numbers)
    (chosen,) = [button for button in panel.shelf if button.button_style == "primary"]
    exhibit = gallery()[numbers[-1] - 1]
    assert chosen.description == exhibit.place and state.selection.image is exhibit
    assert f">{exhibit.name}: " in panel.status.value
    assert (
        panel.controls["caption"].value == exhibit.caption and list(panel.chips)[0] == panel.controls["phrases"].value
    )


def test_up_to_four_models(state, clip_folder):
    assert state.update(model=["base", str(clip_folder)])
    own = [(column.low, column.high) for column in state.shown.columns[:2]]
    assert own[0] != own[1]  # a scale for each model
    assert state.update(same_scale=True)
    assert len({(column.low, column.high) for column in state.shown.columns[:2]}) == 1
    assert [column.signed for column in state.shown.columns] == [False, False, True]
    for number in (2, 3):  # the same model under other names
        state.models[f"copy {number}"] = replace(state.models["base"], name=f"copy {number}")
    assert state.update(model=list(state.models)[-4:]), state.error
    assert not any(column.signed for column in state.shown.columns)  # of more than two there is no difference
    assert state.file("svg").startswith(b"<?xml")
    assert not state.update(model=["base", str(clip_folder), "copy 2", "copy 3", "/no/such"])


def test_an_upload_starts_without_the_old_phrase(state):
    panel = Panel(state)
    assert state.update(image=Image.new("RGB", (200, 60), "teal"), name="wide.png")
    panel._refresh()
    assert panel.controls["phrases"].value == "" and "type a phrase" in panel.status.value
    assert panel.maps.value.count("<img") == 1 and state.file()
    panel.controls["caption"].value = "A dog beside a red car."
    assert state.selection.phrases == ("a dog",) and "never read" in panel.status.value
    assert state.shown.outlines == [None]
    assert "image=" not in panel.state.value  # what was uploaded is on the visitor's machine alone


def test_a_true_phrase_has_its_contour_and_fair_rivals(state):
    names = [name_thing(thing) for thing in gallery()[8].scene.things]  # two nouns in two colours each
    assert state.update(image=9, phrase=names[0])
    (mask,), (scores,) = state.shown.outlines, state.shown.scores
    assert mask.any() and scores[names[0]].ranks["colours"][1] == 7  # the other colour is true as well
    assert state.update(question="without attribute")
    assert state.shown.outlines[1].sum() > mask.sum()  # "a key" is true of both keys
    assert state.update(phrase="a pink umbrella") and state.shown.outlines == [None]
    assert state.shown.scores[0]["a pink umbrella"].ranks["colours"][1] == 8


def test_a_text_brings_everything_back(state, tmp_path):
    Image.new("RGB", (60, 40), "red").save(tmp_path / "mine & yours.png")
    assert state.update(image=str(tmp_path / "mine & yours.png"), caption="a [red] wall?", phrase="a wall | 100 % red")
    assert state.update(kind="softmax", scale=3.5, opacity=0.5, smooth=True, same_scale=True)
    other = Explorer(["base"])
    assert other.update(state="http://127.0.0.1:8866/?" + selection_text(state.selection)), other.error
    assert replace(other.selection, image=state.selection.image) == state.selection


def test_layers_and_heads_of_two_towers(state, clip_folder):
    assert state.update(model=["base", str(clip_folder)])
    panel = Panel(state)
    assert (state.most("layer"), state.most("head")) == (1, 2) and len(panel.controls["layer"].options) == 2
    last = [column.maps for column in state.shown.columns]
    assert state.update(layer=1) and "1 block before the last" in state.status
    assert not any(torch.equal(a, b.maps) for a, b in zip(last, state.shown.columns))
    assert not state.update(layer=2) and "the model has 2 blocks" in state.error  # of the smaller one
    for head in (1, 2):
        assert state.update(layer=0, kind="head", head=head), state.error
        assert all(column.maps.sum() < 100.1 for column in state.shown.columns[:2])
