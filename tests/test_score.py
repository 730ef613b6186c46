"""The score: phrases as MaxSim on every kind of towers, presence, and the folders of sentence-transformers."""

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from small_models import small_siglip

from c2lip.core import UserError
from c2lip.lab.evaluation.embeddings import embed
from c2lip.score import (
    Embedded,
    Score,
    encode_images,
    encode_texts,
    fit_presence,
    fit_vector_head,
    maxsim,
    phrase_texts,
    presence,
    scores_of,
    to_sentence_transformers,
)
from c2lip.towers import load, save
from c2lip.towers.onnx import export_onnx
from c2lip.towers.transformers import to_hugging_face

TEXTS = ["A red mug on the left of a blue fish.", "two hats beside a boat and a key", "nothing at all", "été"]


@pytest.fixture(
    scope="module", params=["SigLIP", "causal SigLIP", "CLIP", "transformers' SigLIP", "transformers' CLIP"]
)
def towers(request, tmp_path_factory):
    own = {"SigLIP": small_siglip, "causal SigLIP": lambda: load("base"), "CLIP": lambda: load("base_clip")}
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


def test_a_vector_head_is_one_cosine(towers, images, tmp_path):
    "Fitted, kept in a release, read again, and carried on; other weights have no use for it"
    embedded = Embedded.of(towers, images)
    texts = TEXTS[:3]
    head = fit_vector_head(embedded.patches, phrase_texts(texts * 3), embedded.text, 6, steps=4, progress=False)
    Score(vector=head).keep(save(towers, tmp_path / "release"))
    again = load(save(load(tmp_path / "release"), tmp_path / "again"))

    score = Score.load(again, "vector").of(images, texts)
    mapped = head.image(embedded.patches) @ head.text([embedded.text(stated) for stated in phrase_texts(texts)]).T
    cosine = Score(1.0, 0.0, towers=towers).of(images, texts)
    assert (score - (1 - head.share) * cosine - head.share * mapped).abs().max() < 1e-5
    assert list(scores_of(again)) == ["vector", "phrases"]

    again.model.logit_scale.data += 1
    save(again, tmp_path / "other")
    assert list(scores_of(load(tmp_path / "other"))) == ["phrases"]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_maxsim_is_phrases(towers, images, share):
    "As the evaluation computes it, from images that it opens itself"
    named = {(lambda image=image: image): "a test" for image in images}
    score = Score(1 - share, share)
    pairs = [(image, text) for text in TEXTS for image in named]
    wanted = score.pairs(embed(towers, named, named, progress=False), *map(list, zip(*pairs)))

    served = maxsim(encode_texts(towers, TEXTS, share), encode_images(towers, images, batch_size=3))
    assert np.abs(served - wanted.view(len(TEXTS), -1).numpy()).max() < 1e-5


def test_presence_is_a_curve_of_the_best_patch(towers, images, tmp_path):
    "Of every kind of towers; its numbers go with the weights, and with no others"
    phrases = ["a red mug", "a blue fish", "a white key"]
    best = maxsim(encode_texts(towers, phrases, 1.0, [[phrase] for phrase in phrases]), encode_images(towers, images))
    true, false = ([[phrases[i]] for i in places] for places in (best.argmax(0), best.argmin(0)))
    fitted = fit_presence(towers, images, true, false)
    fitted.keep(save(towers, tmp_path / "one"))
    copy = load(save(load(tmp_path / "one"), tmp_path / "two"))
    with pytest.raises(UserError, match="no better than false ones"):
        fit_presence(towers, images, false, true)

    for prior in (0.5, 0.03):
        answer = presence(copy, images[4], phrases, prior)
        assert np.abs(answer.probability - fitted.probability(best[:, 4], prior)).max() < 1e-4
        assert np.array_equal(answer.maps.max(1), answer.probability)

    copy.model.logit_scale.data += 1
    with pytest.raises(UserError, match="has no curve of presence"):
        presence(load(save(copy, tmp_path / "three")), images[4], phrases)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    towers = load("tuned")
    folder = tmp_path_factory.mktemp("served")
    to_sentence_transformers(towers, folder, share=0.3)
    return towers, MultiVectorEncoder(str(folder), trust_remote_code=True)


def test_sentence_transformers_gives_the_score(served, images, tmp_path):
    towers, model = served
    wanted = maxsim(encode_texts(towers, TEXTS, 0.3), encode_images(towers, images))
    queries = model.encode_query(TEXTS)
    documents = model.encode_document(images)
    counts = torch.tensor([[len(query)] for query in queries])
    assert np.abs((model.similarity(queries, documents) - counts).numpy() - wanted).max() < 1e-5

    model.save(str(tmp_path / "again"))
    assert scores_of(load(tmp_path / "again"))["phrases"] == Score(0.7, 0.3)
    modules = tmp_path / "again" / "modules.json"
    older = modules.read_text().replace("c2lip.score.vectors.", "c2lip.multivector.")  # as written folders name it
    assert "c2lip.multivector.SentenceModule" in older
    modules.write_text(older)
    again = MultiVectorEncoder(str(tmp_path / "again"), trust_remote_code=True)
    assert all(map(torch.equal, again.encode_query(TEXTS), queries))
    with pytest.raises(ValueError, match="trust_remote_code"):
        MultiVectorEncoder(str(tmp_path / "again"))


def test_plain_folders(towers, images, tmp_path):
    "v·t: of any towers by the module of ours, of an export to transformers without it"
    wanted = maxsim(encode_texts(towers, TEXTS, 0.0), encode_images(towers, images))
    to_sentence_transformers(towers, tmp_path / "ours", share=0.0)
    models = [SentenceTransformer(str(tmp_path / "ours"), trust_remote_code=True)]
    try:
        to_hugging_face(towers, tmp_path / "stock")
        models.append(SentenceTransformer(str(tmp_path / "stock"), processor_kwargs={"backend": "pil"}))
    except UserError as e:
        assert "its text tower is causal" in str(e)

    for model in models:
        scores = model.similarity(model.encode(TEXTS), model.encode(images))
        assert np.abs(scores.numpy() - wanted).max() < 1e-5


@pytest.fixture(scope="module")
def headed(images):
    "A model with a vector head, and its score of the images (N,T)"
    towers = load("tuned")
    return towers, Score.load(towers, "vector").of(images, TEXTS)


def test_a_plain_folder_serves_the_vector_head(headed, images, tmp_path):
    "Stock SentenceTransformer: one vector, by cosine the score that the library gives"
    towers, wanted = headed
    to_sentence_transformers(towers, tmp_path / "served", share=0.0)
    model = SentenceTransformer(str(tmp_path / "served"), trust_remote_code=True)
    assert model.encode(TEXTS[:1]).shape == (1, 128)
    assert (model.similarity(model.encode(images), model.encode(TEXTS)) - wanted).abs().max() < 1e-5


def test_one_call_of_onnxruntime_gives_the_vector(headed, images, tmp_path):
    "Of images and of a text with its phrases; the text alone asks by v·t; of nothing there is nothing"
    towers, wanted = headed
    assert export_onnx(towers, tmp_path / "onnx") < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    pixels = torch.stack([towers.preprocess(image) for image in images]).numpy()
    for text, phrases, scores in zip(TEXTS, phrase_texts(TEXTS), wanted.T.numpy()):
        ids = towers.token_ids([text, *phrases]).numpy()
        v, _, t, image, asked = session.run(None, {"images": pixels, "ids": ids})
        assert np.abs(image @ asked[0] - scores).max() < 1e-5

        *_, alone = session.run(None, {"images": pixels[:0], "ids": ids[:1]})
        assert np.abs(image @ alone[0] - 0.9 * v @ t[0]).max() < 1e-5
    *_, nothing = session.run(None, {"images": pixels, "ids": ids[:0]})
    assert nothing.shape == (0, 128)


def test_a_folder_of_others_stays(tmp_path):
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(UserError, match=r"holds modules.json, which is not written over"):
        to_sentence_transformers(load("base"), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["modules.json"]
