"""What a model's name brings along: layers, activation, images, texts; and what is refused before it is opened."""

import json
import pickle
import re
import shutil
import time

import open_clip
import pytest
import safetensors.torch
import torch
from PIL import Image
from small_models import small_siglip
from writing import Canary

from c2lip.core import UserError, seeded
from c2lip.lab.dev.command import main
from c2lip.towers import convert, load, origin, resolve, save
from c2lip.towers.folders import base_folder
from c2lip.towers.transformers import to_hugging_face

OPENAI = (0.48145466, 0.4578275, 0.40821073)
HALF = (0.5, 0.5, 0.5)
SIGLIP = [  # name, pixels, vocabulary, repository of the weights, of the tokenizer
    ("ViT-B-16-SigLIP", 224, 32000, "timm/ViT-B-16-SigLIP", "timm/ViT-B-16-SigLIP"),
    ("ViT-B-16-SigLIP:random", 224, 32000, "", "timm/ViT-B-16-SigLIP"),
    ("ViT-L-16-SigLIP-256", 256, 32000, "timm/ViT-L-16-SigLIP-256", "timm/ViT-B-16-SigLIP"),
    ("ViT-B-16-SigLIP2", 224, 256000, "timm/ViT-B-16-SigLIP2", "timm/ViT-B-16-SigLIP2"),
]
CLIP = [  # name, mean, quick GELU, repository of the weights
    ("ViT-B-32:openai", OPENAI, True, "timm/vit_base_patch32_clip_224.openai"),
    ("ViT-B-32:laion2b_s34b_b79k", OPENAI, False, "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"),
    ("ViT-B/16:openai", OPENAI, True, "timm/vit_base_patch16_clip_224.openai"),
    ("ViT-L-14:laion2b_s32b_b82k", HALF, False, "laion/CLIP-ViT-L-14-laion2B-s32B-b82K"),
]


@pytest.mark.parametrize("name, pixels, vocabulary, weights, tokenizer", SIGLIP, ids=[m[0] for m in SIGLIP])
def test_what_a_siglip_name_means(name, pixels, vocabulary, weights, tokenizer):
    found = meaning(resolve(name), "canonicalize")
    assert found == (pixels, 64, vocabulary, False, weights, tokenizer, "squash", "bicubic", HALF)


@pytest.mark.parametrize("name, mean, quick, weights", CLIP, ids=[m[0] for m in CLIP])
def test_what_a_clip_name_means(name, mean, quick, weights):
    found = meaning(resolve(name), "lower")
    assert found == (224, 77, 49408, quick, weights, "", "shortest", "bicubic", mean)


def meaning(spec, clean):
    "Pixels, tokens, vocabulary, quick GELU, repositories, and how images are read; texts are cleaned by `clean`"
    text = spec.config["text_cfg"]
    images = spec.preprocess
    assert text.get("tokenizer_kwargs", {}).get("clean", "lower") == clean
    sizes = spec.config["vision_cfg"]["image_size"], text["context_length"], text["vocab_size"]
    parts = spec.config.get("quick_gelu", False), spec.weights, spec.tokenizer
    return *sizes, *parts, images["resize_mode"], images["interpolation"], tuple(images["mean"])


def test_every_tag_decides_its_activation():
    "Of all weights that open_clip lists, none is built without the quick GELU that it was trained with"
    for name, tag in open_clip.list_pretrained():
        if open_clip.get_pretrained_cfg(name, tag).get("quick_gelu"):
            assert resolve(f"{name}:{tag}").config["quick_gelu"], (name, tag)


@pytest.fixture
def named(tmp_path, monkeypatch):
    "named(tag's extras, tokenizer=…): a tiny model under an open_clip name, whose 'download' is a file here"

    def make(tag, tokenizer="", text=None):
        text_cfg = dict(context_length=20, vocab_size=49408, width=32, heads=2, layers=1, **(text or {}))
        if tokenizer:
            text_cfg["hf_tokenizer_name"] = tokenizer
        vision_cfg = dict(image_size=32, patch_size=8, width=32, layers=1, head_width=16)
        config = dict(embed_dim=32, custom_text=True, vision_cfg=vision_cfg, text_cfg=text_cfg)
        entry = dict(url="", hf_hub="somebody/tiny/", mean=HALF, std=HALF, interpolation="bicubic", **tag)
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "ViT-tiny", config)
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "ViT-tiny", {"mine": entry})
        torch.manual_seed(0)
        model = open_clip.model.CustomTextCLIP(**{k: v for k, v in config.items() if k != "custom_text"})
        safetensors.torch.save_file(model.state_dict(), tmp_path / "weights.safetensors")
        found = str(tmp_path / "weights.safetensors")
        monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *a, **k: found)

        return load("ViT-tiny:mine")

    return make


def has_quick_gelu(towers):
    return any(isinstance(m, open_clip.transformer.QuickGELU) for m in towers.model.modules())


def test_quick_gelu_follows_the_weights(named):
    quick = named(dict(quick_gelu=True, resize_mode="shortest"))
    assert has_quick_gelu(quick)
    assert quick.config["quick_gelu"]
    assert "CenterCrop" in str(quick.preprocess)
    assert quick.preprocess_cfg["mean"] == HALF
    plain = named(dict(resize_mode="squash"))
    assert not has_quick_gelu(plain)
    assert "CenterCrop" not in str(plain.preprocess)


def test_texts_are_read_as_the_weights_expect(named):
    clip = named(dict(resize_mode="shortest"))
    assert clip.model.context_length == 20
    assert clip.tokenizer(["A  Red MUG"]).tolist() == clip.tokenizer(["a red mug"]).tolist()
    assert clip.tokenizer(["a red mug"]).shape == (1, 20)
    assert clip.tokenizer(["a, mug"]).tolist() != clip.tokenizer(["a mug"]).tolist()
    siglip = named(dict(resize_mode="squash"), str(base_folder()), dict(tokenizer_kwargs=dict(clean="canonicalize")))
    rows = siglip.tokenizer(["A  Red, MUG!", "a red mug", "a red mug " * 30])
    assert rows.shape == (3, 20)
    assert rows[0].tolist() == rows[1].tolist()
    assert rows[1, -1] == 0 and rows[2, -1] == 1, "padded to the length, cut at it, the end kept"


def test_a_release_remembers(named, tmp_path):
    first = named(dict(quick_gelu=True, resize_mode="shortest"))
    again = load(save(first, tmp_path / "model"))
    x = torch.randn(2, 3, 32, 32)
    ids = first.tokenizer(["a red mug", "two dogs"])
    with torch.no_grad():
        assert torch.equal(first.model.encode_image(x), again.model.encode_image(x))
        again_ids = again.tokenizer(["a red mug", "two dogs"])
        assert torch.equal(first.model.encode_text(ids), again.model.encode_text(again_ids))
    assert str(first.preprocess) == str(again.preprocess)
    assert origin(first) == {"name": "ViT-tiny:mine"}


@pytest.mark.parametrize(
    "name, words",
    [
        ("ViT-B-16-SigLIP", ["hf download timm/ViT-B-16-SigLIP ", ":random"]),
        ("ViT-L-16-SigLIP-256", ["timm/ViT-B-16-SigLIP "]),
        ("ViT-B-32:openai", ["hf download timm/vit_base_patch32_clip_224.openai "]),
        ("hf-hub:somebody/model", ["hf download somebody/model "]),
    ],
)
def test_offline_says_what_to_download(name, words):
    start = time.time()
    with pytest.raises(UserError) as e:
        load(name)
    assert all(w in str(e.value) for w in words) and "\n" not in str(e.value) and time.time() - start < 20, str(e.value)


def test_no_pickle_is_opened(tmp_path):
    mark = tmp_path / "opened"
    for f in ("tokenizer.json", "tokenizer_config.json", "open_clip_config.json"):
        shutil.copy(base_folder() / f, tmp_path)
    for name in ("open_clip_pytorch_model.bin", "epoch_5.pt", "model.pth", "x.ckpt"):
        (tmp_path / name).write_bytes(pickle.dumps({"state_dict": Canary(mark)}))
        for asked in (tmp_path / name, tmp_path):
            with pytest.raises(UserError, match="pickle"):
                load(asked)
        with pytest.raises(UserError, match="has no weights"):
            load(f"ViT-B-32:{tmp_path / name}")
        (tmp_path / name).unlink()

    assert not mark.exists()


def test_a_folders_own_images(tmp_path):
    folder = shutil.copytree(base_folder(), tmp_path / "run" / "model")
    cfg = json.loads((folder / "open_clip_config.json").read_text())
    cfg["preprocess_cfg"] |= {"mean": [0.1, 0.2, 0.3], "resize_mode": "longest"}
    (folder / "open_clip_config.json").write_text(json.dumps(cfg))
    for name in (folder, tmp_path / "run"):
        with pytest.raises(UserError, match="is not the file that record.json was written with"):
            load(name)
        towers = load(name, check=False)
        assert list(towers.preprocess_cfg["mean"]) == [0.1, 0.2, 0.3]
        assert "ResizeKeepRatio" in str(towers.preprocess)
    with open(folder / "open_clip_model.safetensors", "r+b") as f:
        f.truncate(100_000)
    with pytest.raises(UserError, match="cannot be loaded"):
        load(folder, check=False)

    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no open_clip_model.safetensors"):
        load(folder, check=False)


def test_an_absent_hub_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr("c2lip.towers.models.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("c2lip.towers.models.get_session", lambda: asked.append(1) or 1 / 0)
    with pytest.raises(UserError, match="the hub does not answer"):
        load("hf-hub:somebody/model")
    assert len(asked) == 1


# ---- files of other tools


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    "Kind → a model with random weights, its release, its folder of transformers, and a model that it was tuned from"
    home = tmp_path_factory.mktemp("others")

    made = {}
    for kind, towers in {"clip": load("base_clip"), "siglip": small_siglip()}.items():
        before = save(towers, home / f"{kind}-before")
        with seeded(1), torch.no_grad():
            for weight in towers.model.parameters():
                weight.add_(0.02 * torch.randn_like(weight))
        to_hugging_face(towers, home / f"{kind}-transformers")
        weights = safetensors.torch.load_file(home / f"{kind}-transformers" / "model.safetensors")
        made[kind] = (towers.model, save(towers, home / kind), weights, before)
    return made


def renamed(state, before):
    return {f"{before}{name}": weight for name, weight in state.items()}


FORMS = {  # file → what it holds of a state, or writes with the model
    "trainer.pt": lambda s: {
        "epoch": 3,
        "state_dict": renamed(s, "module."),
        "optimizer": {"state": {0: {"exp_avg": s["logit_scale"]}}},
    },
    "bare.pth": lambda s: s,
    "averaged.bin": lambda s: {"n_averaged": torch.tensor(2)} | renamed(s, "module."),
    "compiled.bin": lambda s: {"model": renamed(s, "_orig_mod."), "rng": torch.get_rng_state()},
    "ema.pt": lambda s: {"state_dict": {n: 2 * w for n, w in s.items()}, "state_dict_ema": renamed(s, "module.")},
    "lora.pt": lambda s: {
        n.replace("c_fc.", "c_fc.base_layer."): w for n, w in renamed(s, "base_model.model.").items()
    },
    "old.pt": lambda s: {n.removeprefix("" if "logit_bias" in s else "text."): w for n, w in s.items()},
    "plain.safetensors": lambda s: s,
    "visual.pt": lambda s: {"model": {n: w for n, w in s.items() if n.startswith("visual.")}},
}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("form", [*FORMS, "transformers.bin", "transformers.safetensors"])
def test_a_file_of_another_tool_is_what_it_was(form, kind, others, tmp_path):
    "Its release gives the embeddings that open_clip's own load of the model gives, bit by bit"
    model, folder, transformers, before = others[kind]
    state = model.state_dict()
    path = tmp_path / form
    content = transformers if "transformers" in form else FORMS[form](state)
    write = safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save
    write(content, path)
    release = convert(path, tmp_path / "release", str(before), "ema" if form == "ema.pt" else "")

    stock, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{release}")
    image = prepare(Image.linear_gradient("L").convert("RGB"))[None]
    ids = open_clip.get_tokenizer(f"local-dir:{release}")(["a red mug", "a blue fish"])
    same = open_clip.create_model(f"local-dir:{folder}")
    texts = open_clip.create_model(f"local-dir:{before if form == 'visual.pt' else folder}")
    with torch.no_grad():
        assert torch.equal(stock.eval().encode_image(image), same.eval().encode_image(image))
        assert torch.equal(stock.encode_text(ids), texts.eval().encode_text(ids))


def test_an_activation_comes_with_the_tag(named, tmp_path):
    torch.save(named(dict(resize_mode="shortest")).model.state_dict(), tmp_path / "w.pt")
    for quick in (True, False):
        tuned_from = named(dict(quick_gelu=quick, resize_mode="shortest"))
        assert has_quick_gelu(load(convert(tmp_path / "w.pt", tmp_path / str(quick), tuned_from.name))) == quick


REFUSED = {  # what is saved of a state → what the one line says
    "code": (
        lambda s, mark: {"state_dict": s, "hook": Canary(mark)},
        "not converted: more than weights .*io.open., which is never run",
    ),
    "missing": (lambda s, _: {n: w for n, w in s.items() if n != "text.ln_final.bias"}, "Missing.*text.ln_final.bias"),
    "missing of an image tower": (
        lambda s, _: {n: w for n, w in s.items() if n[:7] == "visual." and n != "visual.proj"},
        'Missing key.*"visual.proj"',
    ),
    "LoRA": (lambda s, _: s | {"visual.lora_A.weight": torch.zeros(3)}, "not merged: .*merge_and_unload"),
    "two models": (lambda s, _: {"model": s, "ema": s}, "several models, (ema|model).*name one"),
    "another model": (lambda s, _: {"encoder.w": torch.zeros(3)}, "no weight has a name .*encoder.w"),
    "not finite": (lambda s, _: s | {"logit_scale": torch.tensor(float("nan"))}, "not finite, in logit_scale"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_file_that_is_refused(fault, tmp_path, capsys):
    make, says = REFUSED[fault]
    torch.save(make(load("base_clip").model.state_dict(), tmp_path / "opened"), tmp_path / "w.pt")
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "made"), "--model", "base_clip"]) == 2
    told = capsys.readouterr().err
    assert re.search(says, told) and told.count("\n") == 1, told
    assert not (tmp_path / "opened").exists()
    assert not (tmp_path / "made").exists()


def test_a_torchscript_archive_is_refused(tmp_path):
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    torch.jit.script(Scaled()).save(tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"weights and plain data \(TorchScript\), which is never run"):
        convert(tmp_path / "w.pt", tmp_path / "made", "base_clip")
