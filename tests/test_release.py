"""A release is the same model wherever it is loaded: stock open_clip and transformers, without this library."""

import json
import shutil
from copy import deepcopy

import numpy as np
import open_clip
import pytest
import safetensors.torch
import torch
import yaml
from conftest import without_library
from PIL import Image
from small_models import small_siglip

from c2lip.core import UserError
from c2lip.encoding import encode_images, encode_texts
from c2lip.lab.data.loading import Samples
from c2lip.lab.relatives import build
from c2lip.lab.training.config import Config
from c2lip.lab.training.fit import fit
from c2lip.lab.training.interpolation import interpolate
from c2lip.lab.world.base_model import BASE_CONFIG, BASE_PREPROCESS, new_towers
from c2lip.lab.world.captions import train_records
from c2lip.towers import Towers, digest, has_bias, load, save
from c2lip.towers.folders import base_folder
from c2lip.towers.transformers import expressible, to_hugging_face

TEXTS = ["A red mug, left of the two_dogs!", "a photo of a dog", "naïve café"]
LOAD = """
import sys
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoModel, AutoProcessor, SiglipVisionModel

for folder in map(Path, sys.argv[1:]):
    texts, image = (folder / "texts.txt").read_text(encoding="utf8").split("\\n"), Image.open(folder / "image.png")
    if (folder / "model").exists():
        model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}/model")
        ids = open_clip.get_tokenizer(f"local-dir:{folder}/model")(texts)
        with torch.no_grad():
            found = model.eval().encode_image(preprocess(image)[None], normalize=True)
            np.savez(folder / "stock.npz", image=found, text=model.encode_text(ids, normalize=True))
    if (folder / "hf").exists():
        model = AutoModel.from_pretrained(folder / "hf").eval()
        processor = AutoProcessor.from_pretrained(folder / "hf", backend="pil")
        inputs = processor(text=texts, images=image, padding="max_length", truncation=True, return_tensors="pt")
        with torch.no_grad():
            out = model(**inputs)
            alone = out.image_embeds
            if type(model).__name__ == "SiglipModel":
                vision_tower = SiglipVisionModel.from_pretrained(folder / "hf").eval()
                alone = F.normalize(vision_tower(inputs.pixel_values).pooler_output, dim=-1)
        found = {"image": out.image_embeds, "text": out.text_embeds, "logits": out.logits_per_image, "alone": alone}
        np.savez(folder / "hf.npz", **found)
assert not any(m.split(".")[0] == "c2lip" for m in sys.modules)
"""


def shake(towers):
    "Random weights far from their start, so that no weight of zero hides a mistake"
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in towers.model.parameters():
            if parameter.ndim:
                parameter += 0.02 * torch.randn_like(parameter)
    towers.model.eval()
    return towers


def full_siglip():
    "The layout of ViT-B-16-SigLIP with random weights; only its text tower is small"
    trunk = dict(timm_model_name="vit_base_patch16_siglip_224", timm_model_pretrained=False, timm_pool="map")
    text = BASE_CONFIG["text_cfg"] | dict(no_causal_mask=True, proj_bias=True, pool_type="last")
    text |= dict(norm_kwargs=dict(eps=1e-6), act_kwargs=dict(approximate="tanh"))
    vision = dict(image_size=224, timm_proj="none", **trunk)
    config = BASE_CONFIG | dict(embed_dim=768, vision_cfg=vision, text_cfg=text)
    return new_towers(base_folder(), config, BASE_PREPROCESS | dict(size=224))


def tiny_clip():
    "A tiny CLIP as OpenAI's: its own tokenizer, quick GELU, cut to the middle"
    vision = dict(image_size=64, patch_size=16, width=64, layers=2, head_width=32)
    text = dict(context_length=77, vocab_size=49408, width=64, heads=2, layers=2)
    config = dict(embed_dim=32, quick_gelu=True, vision_cfg=vision, text_cfg=text)
    preprocess_cfg = dict(size=64, mean=open_clip.OPENAI_DATASET_MEAN, std=open_clip.OPENAI_DATASET_STD)
    preprocess_cfg |= dict(interpolation="bicubic", resize_mode="shortest")
    torch.manual_seed(0)
    model = open_clip.model.CLIP(**deepcopy(config))
    return Towers(model, open_clip.tokenizer.SimpleTokenizer(), config, preprocess_cfg, "new")


KINDS = {
    "siglip": small_siglip,  # stock open_clip does not know its trunk
    "full siglip": full_siglip,
    "clip": tiny_clip,
    "base": lambda: load("base"),
}
ACTIVATIONS = {"siglip": {"gelu", "gelu_pytorch_tanh"}, "clip": {"quick_gelu"}}


def write_inputs(folder):
    "An image and texts for the processes that load the release"
    noise = np.random.default_rng(0).integers(0, 255, (90, 130, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((260, 180))
    image.save(folder / "image.png")
    (folder / "texts.txt").write_text("\n".join(TEXTS), encoding="utf8")
    return image


def own_outputs(towers, image):
    "Our embeddings and logits"
    model = towers.model
    with torch.no_grad():
        v = encode_images(model, towers.preprocess(image)[None])[0]
        t = encode_texts(model, towers.tokenizer(TEXTS))[0]
        scale = model.logit_scale.exp()
        logits = scale * v @ t.T + (model.logit_bias if has_bias(towers) else 0)
    return {"image": v.numpy(), "text": t.numpy(), "logits": logits.numpy(), "scale": float(scale)}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    "kind → (folder, our outputs, largest difference of the export or why there is none)"
    home = tmp_path_factory.mktemp("released")
    made = {}
    for kind, make in KINDS.items():
        towers = shake(make())
        folder = home / kind
        export = ""
        folder.mkdir()
        image = write_inputs(folder)
        if kind != "siglip":
            save(towers, folder / "model")
        try:
            export = to_hugging_face(towers, folder / "hf") if kind != "full siglip" else ""
        except UserError as e:
            export = str(e)
        made[kind] = folder, own_outputs(towers, image), export

    yield made
    shutil.rmtree(home)  # 400 MB


def same(a, b, by):
    return float(np.abs(np.asarray(a) - b).max()) <= by


def test_stock_open_clip_and_transformers(released, run):
    "A process without this library gives the same numbers"
    done = run("python", "-c", LOAD, *(folder for folder, *_ in released.values()), cwd="/", env=without_library())
    assert done.returncode == 0, done.out[-3000:]

    for kind, (folder, ours, largest) in released.items():
        if kind != "siglip":
            stock = np.load(folder / "stock.npz")
            assert same(stock["image"], ours["image"], 1e-6) and same(stock["text"], ours["text"], 1e-6), kind
            assert abs(ours["text"][0] @ ours["text"][1]) < 0.999, "equality says nothing where all texts are alike"
        if kind not in ACTIVATIONS:
            continue
        hf = np.load(folder / "hf.npz")
        assert largest <= 1e-5 and same(hf["image"], ours["image"], 1e-5) and same(hf["text"], ours["text"], 1e-5), kind
        assert same(hf["logits"], ours["logits"], 1e-5 * ours["scale"]) and same(hf["alone"], hf["image"], 1e-5), kind
        back = load(folder / "hf")  # as a start: the same numbers, and released again the same weights
        again = own_outputs(back, Image.open(folder / "image.png"))
        assert all(same(hf[part], again[part], 1e-5) for part in ("image", "text")), kind
        to_hugging_face(back, folder / "again")
        first, second = (safetensors.torch.load_file(folder / at / "model.safetensors") for at in ("hf", "again"))
        assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first), kind
        asks = json.loads((folder / "again" / "config.json").read_text()) | {"auto_map": {"AutoModel": "evil.Model"}}
        (folder / "again" / "config.json").write_text(json.dumps(asks))
        with pytest.raises(UserError, match="no code of a model folder is run"):
            load(folder / "again")
        own = load(save(back, folder / "tuned"))
        assert same(own_outputs(own, Image.open(folder / "image.png"))["text"], again["text"], 0), kind
        config = json.loads((folder / "hf" / "config.json").read_text())
        names = json.loads((folder / "hf" / "tokenizer_config.json").read_text())  # as transformers 4 knows them
        assert names["tokenizer_class"] in ("PreTrainedTokenizerFast", "CLIPTokenizer"), names["tokenizer_class"]
        activations = {config[f"{tower}_config"]["hidden_act"] for tower in ("vision", "text")}
        assert activations == ACTIVATIONS[kind], kind


def test_what_transformers_cannot_express(released):
    folder, _, why = released["base"]
    assert why == expressible(load("base"))
    assert "causal" in why
    assert "class or register tokens" in why
    assert not (folder / "hf").exists()
    assert why in (folder / "model" / "README.md").read_text()
    assert "CLIPModel.from_pretrained" in (released["clip"][0] / "model" / "README.md").read_text()


def test_average_of_folders(tmp_path):
    other = shake(load("base"))
    save(other, tmp_path / "run" / "model")
    before = load("base").model.state_dict()
    after = other.model.state_dict()
    for name, weight in interpolate("base", tmp_path / "run", 0.3).model.state_dict().items():
        want = 0.7 * before[name].double() + 0.3 * after[name].double()
        assert weight.dtype == torch.float32 and torch.allclose(weight.double(), want, rtol=1e-7, atol=1e-9), name
    with pytest.raises(UserError, match="cannot be averaged.*both must be of one model"):
        interpolate("base", tiny_clip(), 0.5)


def front_matter(text):
    return yaml.safe_load(text.split("---")[1])


def test_the_card(tmp_path):
    settings = {"method": "c2lip", "data": "/data/somebody/secret/photos", "images": 6000, "note": "a | b"}
    settings |= {"model": "/data/somebody/x/y", "run_dir": "/data/somebody/run"}
    folder = save(load("base"), tmp_path / "run-7" / "model", {"settings": settings, "steps": np.int64(3)})
    text = (folder / "README.md").read_text(encoding="utf8")
    head = front_matter(text)
    assert head["license"] == "unknown"
    assert head["library_name"] == "open_clip"
    assert "$" not in text
    assert "base_model" not in head
    assert "c2lip" in head["tags"]

    named = ("# run-7", "Nothing was measured", "photos", "…/x/y", r"a \| b", digest(folder), digest(base_folder()))
    assert all(part in text for part in named), text
    assert "/data/somebody" not in text
    assert "`images`" not in text, "the size of the embedded world says nothing of a model trained on photographs"

    towers = load("base")
    towers.name = "ViT-B-16-SigLIP:webli"
    record = {"settings": settings | {"data": "world"}}
    text = (save(towers, tmp_path / "run-8", record) / "README.md").read_text(encoding="utf8")
    assert "| `images` | 6000 |" in text
    assert front_matter(text)["base_model"] == "timm/ViT-B-16-SigLIP"


def test_the_embedded_clip_is_trained_and_released(tmp_path):
    "A CLIP stays a stock CLIP: what npc and xac learn beside it is in no file of the release"
    towers = load("base_clip")
    before = {name: weight.clone() for name, weight in towers.model.state_dict().items()}
    method = build("c2lip", towers)
    samples = Samples(train_records(32), towers.preprocess, towers.tokenizer)
    cfg = Config(model="base_clip", images=32, epochs=1, batch_size=16, lr=1e-3, warmup=1, alpha=1.0)
    assert fit(towers, method, samples, cfg, tmp_path / "run") == 2

    save(towers, tmp_path / "model")
    stock = open_clip.create_model(f"local-dir:{tmp_path / 'model'}", require_pretrained=True)
    after = stock.state_dict()
    assert after.keys() == before.keys()
    assert getattr(stock, "logit_bias", None) is None

    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > 0.9 * len(before)
    assert all(weight.isfinite().all() for weight in after.values())
    assert expressible(load(tmp_path / "model")) == "CLIPModel"
