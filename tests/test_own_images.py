"""Your own images and your own model: nothing in the path is tied to the embedded world."""

import json

import numpy as np
import pytest
from PIL import Image

PHOTOGRAPHS = {  # photographs that come inside scikit-image and scikit-learn, with captions written for this test
    "astronaut": (
        "A smiling woman in an orange space suit stands before a flag. A model of a white shuttle is behind her."
    ),
    "chelsea": "A brown cat with green eyes looks at the camera.",
    "coffee": "A cup of coffee stands on a wooden table beside a small spoon.",
    "rocket": "A white rocket leaves a launch pad with a cloud of smoke.",
    "china": "An old temple with a green roof stands under a blue sky.",
    "flower": "A pink flower with a yellow heart grows among dark green leaves.",
}


@pytest.fixture(scope="module")
def my_photos(tmp_path_factory):
    import skimage.data
    from sklearn.datasets import load_sample_image

    folder = tmp_path_factory.mktemp("my_photos")
    rows = []
    for name, caption in PHOTOGRAPHS.items():
        image = load_sample_image(f"{name}.jpg") if name in ("china", "flower") else getattr(skimage.data, name)()
        Image.fromarray(np.asarray(image)[..., :3]).save(folder / f"{name}.jpg")
        rows.append({"file": f"{name}.jpg", "caption": caption})
    (folder / "captions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.mark.parametrize(
    "model, extra",
    [("base", []), ("ViT-B-16-SigLIP:random", ["-p", "hold_back", "0", "-p", "lr", "1e-5"])],
    ids=["base", "ViT-B-16-SigLIP of random weights"],
)
def test_train_on_photographs(model, extra, my_photos, tmp_path, run):
    """Six photographs, one step, from the table to the released model that stock open_clip loads"""
    done = run(
        "papermill",
        "nbs/train.ipynb",
        "-p",
        "data",
        my_photos,
        "-p",
        "model",
        model,
        "-p",
        "batch_size",
        "2",
        "-p",
        "epochs",
        ".34",
        "-p",
        "batches",
        "random",
        "-p",
        "warmup",
        "1",
        "-p",
        "run_dir",
        tmp_path / "run",
        "-p",
        "concepts",
        "pool",
        *extra,
        timeout=600,
    )
    assert done.returncode == 0, done.out[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 1 and {"contrastive", "npc", "xac"} <= set(rows[-1])
    assert (tmp_path / "run" / "attention.png").stat().st_size > 5000
    program = f"""
import open_clip, torch
model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{tmp_path}/run/model")
words = open_clip.get_tokenizer("local-dir:{tmp_path}/run/model")(["a brown cat"])
print("norm", model.encode_text(words).norm().item() > 0, "mean", list(preprocess.transforms[-1].mean))
import sys; assert "c2lip" not in sys.modules
"""
    stock = run("python", "-c", program, cwd="/", timeout=300)
    assert "norm True mean [0.5, 0.5, 0.5]" in stock.out, stock.out[-2000:]
