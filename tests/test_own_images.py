"""Your own images and your own model: nothing in the path is tied to the embedded world."""

import re
import shlex

import numpy as np
import pytest
from PIL import Image
from writing import write_captioned

from c2lip.core.files import project_root, read_json
from c2lip.lab.training.run import trained_images
from c2lip.lab.world.base_model import BASE_CONFIG, new_towers
from c2lip.towers import save
from c2lip.towers.folders import base_folder

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


def read_photograph(name):
    import skimage.data
    from sklearn.datasets import load_sample_image

    image = load_sample_image(f"{name}.jpg") if name in ("china", "flower") else getattr(skimage.data, name)()
    return Image.fromarray(np.asarray(image)[..., :3])


@pytest.fixture(scope="module")
def many_photos(tmp_path_factory):
    "Ninety parts of the photographs: enough for the default batch"
    parts = []
    for name, caption in PHOTOGRAPHS.items():
        image = read_photograph(name).resize((200, 200))
        for i in range(15):
            part = image.crop((5 * i, 0, 5 * i + 120, 200))
            parts.append((f"{name}{i}.jpg", part, dict(caption=f"{caption} It is part {i}.")))
    return write_captioned(tmp_path_factory.mktemp("many_photos"), parts)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory):
    "A release folder that is not made from the embedded base: its image tower has another architecture"
    vision = BASE_CONFIG["vision_cfg"] | {"timm_model_name": "test_vit2"}
    towers = new_towers(base_folder(), BASE_CONFIG | {"vision_cfg": vision})
    return save(towers, tmp_path_factory.mktemp("small") / "model", {})


def test_the_readme_s_own_data_command(many_photos, small_checkpoint, tmp_path, run):
    "Word by word, but for the folder and a smaller checkpoint: no default of the embedded world is inherited"
    replaced = {"my_photos": many_photos, "ViT-B-16-SigLIP": small_checkpoint}
    readme = (project_root() / "README.md").read_text(encoding="utf8").splitlines()
    (line,) = [line for line in readme if line.startswith("papermill nbs/train.ipynb -p data my_photos")]
    words = [replaced.get(word, word) for word in shlex.split(line)]
    assert not {"my_photos", "ViT-B-16-SigLIP"} & set(map(str, words))

    done = run(*words, "-p", "run_dir", tmp_path / "run", timeout=600)
    assert done.returncode == 0, done.out[-3000:]
    assert "auto, for this pretrained model: lr 1e-05, warmup 1, evaluate_every 1" in done.out
    assert not re.search(r"^warning: (?!R@1 is|\d+ steps at lr|\d+ texts equal)", done.out, re.M), done.out
    assert "→ A smiling woman · an orange space suit" in done.out

    taken = read_json(tmp_path / "run" / "params.json")
    given = read_json(tmp_path / "run" / "given.json")
    assert (taken["lr"], taken["warmup"], given["lr"], given["warmup"]) == (1e-5, 1, "auto", "auto")
    assert {
        "retrieval,i2t R@1",
        "own_captions,swap",
        "phrases/own_captions,average",
        "parts/own_captions,average",
        "own_captions,without the image",
    } <= {",".join(row.split(",")[2:4]) for row in (tmp_path / "run" / "table.csv").read_text().splitlines()}
    assert (
        read_json(tmp_path / "run" / "model" / "score.json")["parts"]["patches"] == "attention"
    )  # xac trained it at β 10
    assert "held back from training, in percent" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert trained_images(str(tmp_path / "run"), str(many_photos))[1] == 90
    assert trained_images(str(tmp_path / "run"), "world") == (0, 0)
    assert '"validation/R@1"' in (tmp_path / "run" / "metrics.jsonl").read_text()
