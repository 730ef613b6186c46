"""The score of phrases as MaxSim: equal to the evaluation's on every kind of towers."""

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import small_siglip

from c2lip.lab.evaluation.base import Scorer
from c2lip.lab.evaluation.embeddings import embed_images, embed_texts
from c2lip.lab.evaluation.readouts import Reading, Readout
from c2lip.multivector import encode_images, encode_texts, maxsim
from c2lip.towers import load
from c2lip.towers.transformers import to_hugging_face

TEXTS = ["A red mug on the left of a blue fish.", "two hats beside a boat and a key", "nothing at all", "été"]
SHARES = (0.0, 0.3, 0.5, 1.0)


@pytest.fixture(
    scope="module", params=["SigLIP", "causal SigLIP", "CLIP", "transformers' SigLIP", "transformers' CLIP"]
)
def towers(request, tmp_path_factory):
    own = {"SigLIP": small_siglip, "causal SigLIP": lambda: load("tuned"), "CLIP": lambda: load("base_clip")}
    found = own[request.param.removeprefix("transformers' ")]()
    if request.param not in own:
        folder = tmp_path_factory.mktemp("exported")
        to_hugging_face(found, folder)
        found = load(folder)
    return found


@pytest.fixture(scope="module")
def images():
    noise = [Image.effect_noise((90, 70), 30 * n).convert("RGB") for n in range(1, 5)]
    return noise + [Image.new("RGB", (60, 60), colour) for colour in ("red", "blue", "white")]


@pytest.mark.parametrize("share", SHARES)
def test_maxsim_is_the_mixture_by_the_best_patch(towers, images, share):
    named = {(lambda image=image: image): "a test" for image in images}
    vectors = dict(zip(named, embed_images(towers, list(named), progress=False)))
    vectors |= zip(TEXTS, embed_texts(towers, TEXTS, progress=False))

    def look_up(some):
        return torch.stack([vectors[one] for one in some])

    reading = Reading(towers, named, progress=False)
    readout = Readout(share, of="best patch").score(reading, Scorer(look_up, look_up))
    pairs = [(image, text) for text in TEXTS for image in named]
    wanted = readout.pairs(*map(list, zip(*pairs))).view(len(TEXTS), -1).numpy()

    of_texts = encode_texts(towers, TEXTS, share)
    of_images = encode_images(towers, images, batch_size=3)
    found = maxsim(of_texts, of_images)
    assert np.abs(found - wanted).max() < 1e-5
    assert all(array.dtype == np.float32 for array in of_texts + of_images)
