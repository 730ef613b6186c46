"""The explorer's state: what is kept, what is refused, and that nothing dies."""

import json
import time

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from c2lip.attention.explorer import Explorer
from c2lip.attention.maps import MAP_KINDS
from c2lip.attention.panel import Panel
from c2lip.base import BASE_CONFIG
from c2lip.core import UserError
from c2lip.release import save
from c2lip.towers import Towers, load
from c2lip.training.runs import find_models


@pytest.fixture
def state():
    return Explorer(after="base")


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
    for wish in (
        dict(kind="softmax"),
        dict(scale=30.0),
        dict(opacity=0.2),
        dict(smooth=True),
        dict(kind="head"),
        dict(kind="similarity"),
    ):
        assert state.update(**wish), state.error
    assert not state.update(phrase="a new phrase") and "asked" in state.error


def test_a_model_of_another_grid(state, clip_folder):
    assert state.update(before=str(clip_folder), phrase="a red mug | a blue mug"), state.error
    assert "resampled" in state.status and state.shown.maps[0].shape == state.shown.maps[1].shape == (2, 4, 4)
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 200, 3), np.uint8))
    for kind in MAP_KINDS:
        assert state.update(image=wide, kind=kind), state.error
    assert len(state.png()) > 5000


def test_before_and_after_exchanged(state, clip_folder):
    panel = Panel(state)
    panel.model.value = str(clip_folder)
    name = clip_folder.parent.name
    assert (panel.before.value, panel.after.value) == ("base", name)
    assert panel.model.value == ""
    assert name in panel.before.options
    panel.swap.click()
    assert (panel.before.value, panel.after.value) == (name, "base") and "resampled" in panel.status.value
    panel.model.value = str(clip_folder)  # known by now, under its short name
    assert panel.after.value == name and list(state.models).count(name) == 1


def test_models_leave_in_their_order(state, clip_folder, monkeypatch):
    loaded = []
    monkeypatch.setattr("c2lip.attention.explorer.load", lambda name, device: loaded.append(name) or load(name, device))
    small = Explorer(after="base")
    small.cache.keep = 1
    assert small.update(after=str(clip_folder))
    assert small.update(phrase="a hat")
    assert small.update(after="base")
    assert len(small.cache.towers) == 1
    assert all(name in small.cache.towers for name, _ in small.cache.views)


@pytest.mark.parametrize(
    "wish, word",
    [
        (dict(phrase=""), "empty"),
        (dict(phrase="a|b|c|d|e"), "at most four"),
        (dict(phrase="mug " * 100), "longer"),
        (dict(after="/no/such/model"), "no folder"),
        (dict(after="ViT-B-61"), "no model"),
        (dict(image=b"", name="empty.png"), "empty.png"),
        (dict(image="/no/such.png"), "missing"),
        (dict(exhibit=0), "1 to 12"),
        (dict(kind="x"), "no map"),
    ],
)
def test_refusals(state, wish, word):
    before, models = state.selection, dict(state.models)
    assert (
        not state.update(**wish) and word in state.status and "\n" not in state.status and "unchanged" in state.status
    )
    assert state.selection is before and state.models == models
    assert state.update(smooth=True) and not state.error


def test_a_huge_image_is_refused(state, tmp_path):
    Image.new("1", (20_000, 20_000)).save(tmp_path / "huge.png")
    start = time.process_time()
    assert not state.update(image=str(tmp_path / "huge.png"))
    assert "too large" in state.status
    assert time.process_time() - start < 5


def test_odd_words_are_shown_as_they_are(state):
    for phrase in ("a $5 mug", "<b>mug</b> & hat", "a_b^c", "ein roter Bär", "狗", "100 % mug"):
        assert state.update(phrase=phrase), state.error
        assert state.png()
    panel = Panel(state)
    panel.phrase.value = "<script>x</script>"
    assert "<script>" not in panel.status.value and "&lt;script&gt;" in panel.status.value


def test_saved_files_say_what_they_show(state, tmp_path):
    assert state.update(phrase="a red mug", kind="softmax", scale=5.0)
    data = json.loads((state.save(str(tmp_path)) / "maps.json").read_text())
    assert (data["phrases"], data["kind"], data["scale"]) == (["a red mug"], "softmax", 5)
    assert (tmp_path / "maps.svg").read_text().startswith("<?xml")


def test_models_of_runs(tmp_path):
    for name in ("train-1/model", "ablation-2/c2lip/model"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "open_clip_config.json").write_text("{}")
    assert set(find_models(tmp_path)) == {"base", "train-1", "ablation-2/c2lip"}


def test_wrong_models_at_the_start():
    with pytest.raises(UserError, match="no model"):
        Explorer("ViT-B-61")


def test_the_panel_follows(state):
    panel = Panel(state)
    panel.kind.value, panel.opacity.value, panel.smooth.value = "centred", 0.5, True
    selection = state.selection
    assert (selection.kind, selection.opacity, selection.smooth) == ("centred", 0.5, True)
    assert panel.scale.disabled
    buttons, plus = panel.chips.children, next(b for b in panel.beside.values() if b.description == "+")
    plus.click()
    assert len(state.selection.phrases) == 2 and plus.description == "−"
    plus.click()
    assert len(state.selection.phrases) == 1 and plus.description == "+"
    assert panel.chips.children == buttons  # the same ones: the focus stays
    panel.caption.value = "A yellow boat stands over a pink hat."
    assert state.selection.phrases == ("a yellow boat",) and list(panel.chip) == ["a yellow boat", "a pink hat"]
    assert [b.layout.display for b in panel.beside.values()] == ["none", None]
    assert panel.beside["a pink hat"].description == "+"
    panel.path.value = "/no/such.png"
    assert panel.path.value == "/no/such.png" and "c2lip-wrong" in panel.status.value
