"""A release is the model wherever it is loaded: in stock open_clip and in transformers, by processes that never saw this library."""

import json
from copy import deepcopy

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from c2lip.core import UserError
from c2lip.encoding import encode_images, encode_texts
from c2lip.release import digest, push, save
from c2lip.release.interpolation import interpolate
from c2lip.release.transformers import expressible, to_hugging_face
from c2lip.towers import Towers, base_folder, load

TEXTS = ["A red mug, left of the two_dogs!", "a photo of a dog", "naïve café"]
STOCK = """
import sys, numpy as np, open_clip, torch
from PIL import Image
for folder in sys.argv[1:]:
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}/model")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}/model")
    with torch.no_grad():
        image = model.eval().encode_image(preprocess(Image.open(f"{folder}/image.png"))[None], normalize=True)
        text = model.encode_text(tokenizer(open(f"{folder}/texts.txt", encoding="utf8").read().split("\\n")), normalize=True)
    np.savez(f"{folder}/stock.npz", image=image, text=text)
assert not any(m.split(".")[0] == "c2lip" for m in sys.modules)
"""
TRANSFORMERS = """
import sys, numpy as np, torch, transformers
from PIL import Image
from transformers import AutoModel, AutoProcessor
for folder in sys.argv[1:]:
    model, processor = AutoModel.from_pretrained(f"{folder}/hf").eval(), AutoProcessor.from_pretrained(f"{folder}/hf", backend="pil")
    inputs = processor(text=open(f"{folder}/texts.txt", encoding="utf8").read().split("\\n"), images=Image.open(f"{folder}/image.png"), padding="max_length", truncation=True, return_tensors="pt")
    with torch.no_grad(): out = model(**inputs)
    alone = out.image_embeds
    if type(model).__name__ == "SiglipModel":
        with torch.no_grad(): alone = torch.nn.functional.normalize(transformers.SiglipVisionModel.from_pretrained(f"{folder}/hf").eval()(inputs.pixel_values).pooler_output, dim=-1)
    np.savez(f"{folder}/hf.npz", image=out.image_embeds, text=out.text_embeds, logits=out.logits_per_image, alone=alone)
    print(type(model).__name__)
assert not any(m.split(".")[0] == "c2lip" for m in sys.modules)
"""


def shake(made):
    "Random weights far from their start, so that nothing hides behind a zero"
    torch.manual_seed(1)
    with torch.no_grad():
        for p in made.model.parameters():
            if p.ndim:
                p += 0.02 * torch.randn_like(p)
    made.model.eval()
    return made


def clip(quick):
    "A tiny CLIP as OpenAI's: its own tokenizer, quick GELU or not, cut to the middle"
    config = dict(
        embed_dim=32,
        quick_gelu=quick,
        vision_cfg=dict(image_size=64, patch_size=16, width=64, layers=2, head_width=32),
        text_cfg=dict(context_length=77, vocab_size=49408, width=64, heads=2, layers=2),
    )
    torch.manual_seed(0)
    look = dict(
        size=64,
        mean=open_clip.OPENAI_DATASET_MEAN,
        std=open_clip.OPENAI_DATASET_STD,
        interpolation="bicubic",
        resize_mode="shortest",
    )
    return Towers(open_clip.model.CLIP(**deepcopy(config)), open_clip.tokenizer.SimpleTokenizer(), config, look, "new")


def prepared(folder, made):
    "The release, its export where there is one, an image and texts; and our own embeddings"
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (90, 130, 3), dtype=np.uint8)).resize((260, 180))
    image.save(folder / "image.png")
    (folder / "texts.txt").write_text("\n".join(TEXTS), encoding="utf8")
    save(made, folder / "model")
    with torch.no_grad():
        v = encode_images(made.model, made.preprocess(image)[None])[0]
        t = encode_texts(made.model, made.tokenizer(TEXTS))[0]
        scale, bias = made.model.logit_scale.exp(), getattr(made.model, "logit_bias", None)
        return dict(
            image=v.numpy(),
            text=t.numpy(),
            logits=(scale * v @ t.T + (0 if bias is None else bias)).numpy(),
            scale=float(scale),
        )


KINDS = {
    "ViT-B-16-SigLIP": lambda: load("ViT-B-16-SigLIP:random"),
    "clip": lambda: clip(False),
    "quick clip": lambda: clip(True),
    "base": lambda: load("base"),
}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    "kind → (folder, our embeddings, largest difference of the export or why there is none); ViT-B-16-SigLIP is of full size, its weights are random"
    home, made = tmp_path_factory.mktemp("released"), {}
    for kind, make in KINDS.items():
        model = shake(make())
        (home / kind).mkdir()
        ours = prepared(home / kind, model)
        try:
            made[kind] = home / kind, ours, to_hugging_face(model, home / kind / "hf")
        except UserError as e:
            made[kind] = home / kind, ours, str(e)
    yield made
    import shutil

    shutil.rmtree(home)  # 1.7 GB


def same(a, b, by):
    return float(np.abs(np.asarray(a) - b).max()) <= by


def test_stock_open_clip(released, run):
    done = run("python", "-c", STOCK, *(folder for folder, *_ in released.values()), cwd="/")
    assert done.returncode == 0, done.out[-3000:]
    for kind, (folder, ours, _) in released.items():
        stock = np.load(folder / "stock.npz")
        assert same(stock["image"], ours["image"], 1e-6) and same(stock["text"], ours["text"], 1e-6), kind
        assert abs(ours["text"][0] @ ours["text"][1]) < 0.999, "the texts are told apart, so equality says something"


def test_transformers(released, run):
    done = run(
        "python",
        "-c",
        TRANSFORMERS,
        *(folder for folder, _, found in released.values() if isinstance(found, float)),
        cwd="/",
    )
    assert (
        done.returncode == 0 and done.out.split().count("SiglipModel") == 1 and done.out.split().count("CLIPModel") == 2
    ), done.out[-3000:]
    for kind, (folder, ours, found) in released.items():
        if kind == "base":
            continue
        hf = np.load(folder / "hf.npz")
        assert (
            found <= 1e-5
            and all(same(hf[k], ours[k], 1e-5) for k in ("image", "text"))
            and same(hf["logits"], ours["logits"], 1e-5 * ours["scale"])
            and same(hf["alone"], hf["image"], 1e-5)
        ), kind
        config = json.loads((folder / "hf" / "config.json").read_text())
        assert {config[f"{tower}_config"]["hidden_act"] for tower in ("vision", "text")} == {
            "quick_gelu" if kind == "quick clip" else "gelu"
        }, kind
    names = json.loads((released["ViT-B-16-SigLIP"][0] / "hf" / "tokenizer_config.json").read_text())
    assert names["tokenizer_class"] == "PreTrainedTokenizerFast" and names["model_input_names"] == ["input_ids"], (
        "transformers 4 knows this class; SigLIP reads its padding"
    )


def test_what_transformers_cannot_say(released):
    folder, _, why = released["base"]
    assert (
        why == expressible(load("base"))[1]
        and why in (folder / "model" / "README.md").read_text()
        and "SiglipModel.from_pretrained" in (released["ViT-B-16-SigLIP"][0] / "model" / "README.md").read_text()
    )
    assert "causal" in why and "class or register tokens" in why and not (folder / "hf").exists()


def test_average_of_folders(tmp_path):
    other = shake(load("base"))
    save(other, tmp_path / "run" / "model")
    mixed = interpolate("base", tmp_path / "run", 0.3)
    a, b = load("base").model.state_dict(), other.model.state_dict()
    for k, v in mixed.model.state_dict().items():
        assert v.dtype == torch.float32 and torch.allclose(
            v.double(), 0.7 * a[k].double() + 0.3 * b[k].double(), rtol=1e-7, atol=1e-9
        ), k
    assert not torch.equal(mixed.model.logit_scale, a["logit_scale"]) or torch.equal(a["logit_scale"], b["logit_scale"])
    with pytest.raises(UserError, match="cannot be averaged.*both must be of one model"):
        interpolate("base", clip(False), 0.5)
    quick, plain = clip(True), clip(False)
    with pytest.raises(UserError, match="configurations differ in quick_gelu"):
        interpolate(quick, plain, 0.5)


def test_the_card(tmp_path):
    record = {
        "settings": {
            "method": "c2lip",
            "data": "/data/somebody/secret/photos",
            "run_dir": "/data/somebody/run",
            "model": "/data/somebody/x/y",
            "note": "a | b",
        },
        "steps": 3,
        "versions": {"torch": "2"},
    }
    folder = save(load("base"), tmp_path / "run-7" / "model", record)
    text = (folder / "README.md").read_text(encoding="utf8")
    import yaml

    head = yaml.safe_load(text.split("---")[1])
    assert (
        head["license"] == "unknown"
        and head["library_name"] == "open_clip"
        and "base_model" not in head
        and "c2lip" in head["tags"]
    )
    assert (
        "# run-7" in text
        and "/data/somebody" not in text
        and "photos" in text
        and "…/x/y" in text
        and r"a \| b" in text
        and "Nothing was measured" in text
    )
    assert digest(folder) in text and digest(base_folder()) in text
    named = load("base")
    named.name = "ViT-B-16-SigLIP:webli"
    assert (
        yaml.safe_load((save(named, tmp_path / "b") / "README.md").read_text().split("---")[1])["base_model"]
        == "timm/ViT-B-16-SigLIP"
    )


def test_push(tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    class Api:
        def __init__(self, token):
            calls.append(("token", token))

        def create_repo(self, repo, **kw):
            calls.append(("repo", repo, kw))

        def upload_folder(self, **kw):
            calls.append(("upload", kw))
            return "https://hub/me/mugs/commit/1"

    folder = save(load("base"), tmp_path / "model")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="hf auth login"):
        push(folder, "me/mugs")
    assert not calls
    assert push(folder, "me/mugs", token="t") == "https://hub/me/mugs/commit/1"
    assert (
        calls[0] == ("token", "t")
        and calls[1] == ("repo", "me/mugs", {"private": True, "exist_ok": True})
        and calls[2][1]["folder_path"] == folder
    )
    monkeypatch.setattr(Api, "create_repo", lambda *a, **k: (_ for _ in ()).throw(OSError("403 Forbidden\nmore")))
    with pytest.raises(UserError, match="me/mugs could not be written: 403 Forbidden$"):
        push(folder, "me/mugs", token="t")


def test_a_push_without_a_network(tmp_path, monkeypatch):
    folder = save(load("base"), tmp_path / "model")
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("offline"))
    )
    with pytest.raises(UserError, match="could not be written: offline"):
        push(folder, "me/mugs", token="t")
