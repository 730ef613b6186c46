"""README.md and the study: sentences by hand, and every number of them in a record."""

import re
from itertools import product

import pytest
from conftest import ROOT

from c2lip.core.files import read_json
from c2lip.lab.evaluation.results import change_text, read_answers, read_record
from c2lip.lab.serve.search import _Form
from c2lip.lab.study.claims import stored_changes
from c2lip.lab.study.protocol import changes_by_score, read_scores
from c2lip.lab.training.step import BY_MODEL, WEIGHTS
from c2lip.score import read_vector_head
from c2lip.towers import load

PAGE = (ROOT / "README.md").read_text(encoding="utf8")
TYPED = {"3.11", "2.0", "2603.25722"}  # in no record: versions and the paper's number
TYPED_IN_STUDY = {"0.01", "0.5", "35.5", "96.3"}  # settings; a README of a record; computed on page 06
HERE = {str(BY_MODEL["embedded"]["alpha"]), *(f"{weight:g}" for weight in WEIGHTS["embedded"].values())}
WORLDS = ("worlds_photographs", "worlds_emoji", "worlds_frozen")


def change(answers, score, suite, row, before="plain", after="default"):
    "How far one model lies from another in a row, as a page prints it, without the sign"
    (found,) = changes_by_score(answers[before], answers[after], [(suite, row)], [score]).itertuples()
    return found.change.lstrip("+-")


def values(record, *keys):
    "Rows of a record, (model, suite, name), as a page prints them"
    means = read_record(record).groupby(["model", "suite", "name"]).value.mean()
    return {f"{means[key]:.1f}" for key in keys}


def learned_later():
    "Phrase binding by v·t after 2,700 steps, of plain fine-tuning and C2LIP"
    rows = read_record("long_readouts").query("split == 'test' and score == 'both'")
    rows = rows.assign(model=rows.model.str.replace(r", seed \d+$", "", regex=True))
    by_vt = rows.groupby(["model", "suite", "name"]).before.mean()
    return {f"{by_vt[model, 'binding', 'phrases']:.1f}" for model in ("plain", "+ npc + xac")}


def later_change(form, against, *row):
    "A change of a form of the paper after 2,700 steps"
    mean, half = stored_changes("paper_letter_long", against)[f"npc + xac, {form}", *row]
    return change_text(mean, half).lstrip("+-")


SAID_TWICE = [
    ("phrases", "binding", "phrases"),
    ("parts", "world_sugarcrepe_2", "binding"),
]
"Changes that README and the study both have: arguments of `change`"


def on_photographs():
    "How much better the default binds with people's captions, by phrases and by v·t"
    answers = read_answers("photographs_five")
    return [change(answers, score, "binding", "phrases") for score in ("phrases", "v·t")]


def readme_numbers():
    "Changes, and other numbers, of README's sentences"
    searched = read_record("search").query("images == 10_000").set_index("name").value
    towers = load("tuned")
    row = _Form(towers, read_vector_head(towers), vectors=12).columns("S72")  # a path of 72 letters
    numbers = {f"{row.itemsize / 1000:.1f}"}
    assert f"{searched['ms a query, median']:.0f} ms" in PAGE

    bag = read_record("search_bag").set_index("name").value
    numbers |= {f"{bag[name]:.1f}" for name in ("phrases", "vector, int8", "v·t", "fewest other words")}

    numbers |= values("readings", *product(["plain", "default"], ["retrieval"], ["i2t R@1"]))
    numbers |= values("readings", ("default", "phrases/binding", "phrases"))
    by_vector = [("default, vector", *row) for row in (("binding", "phrases"), ("retrieval", "R@1"))]
    by_vt = ("default", "binding", "phrases")
    numbers |= values("vector_drawn", by_vt, *by_vector, ("plain, vector", "binding", "phrases"))
    _, answers = read_scores()
    changes = [change(answers, *row) for row in SAID_TWICE]
    return changes + on_photographs() + [later_change("code", "plain", "binding", "phrases")], numbers


def study_numbers():
    "The same of the study's"
    _, answers = read_scores()
    rows = [
        ("parts", "binding", "phrases"),
        ("parts", "binding", "phrases", "default", "xac"),
        ("parts", "zeroshot", "object", "default", "xac"),
        ("v·t", "world_sugarcrepe_pp", "average TOT"),
        ("v·t", "zeroshot", "object", "base"),
        ("v·t", "retrieval", "i2t R@1"),
        ("parts", "retrieval", "i2t R@1"),
    ]
    changes = [change(answers, *row) for row in (*SAID_TWICE, *rows)] + on_photographs()[:1]
    for form in ("paper", "code"):
        for against, row in (("plain", ("binding", "phrases")), (f"npc, {form}", ("localisation", "AUROC"))):
            changes.append(later_change(form, against, *row))

    in_doubt = [("default", "parts/doubts", name) for name in ("sizes exchanged", "one or two")]
    numbers = values("readings", *in_doubt)
    for record in WORLDS[:2]:
        numbers |= values(record, ("base", "zeroshot", "object"))
    ninety = read_record("ninety_seconds").query("track == 'any score' and name == 'phrases'")
    ninety = ninety.groupby("model").value.mean()
    numbers |= {f"{ninety[model]:.1f}" for model in ("plain", "default")}

    binding = ("default", "parts/binding", "phrases")
    (whole,), (half,) = (values(record, binding) for record in ("readings", "readings_half"))
    frozen = read_answers("worlds_frozen")
    relations = [change(frozen, "parts", "world_sugarcrepe_2", "replace_rel", before) for before in ("base", "plain")]
    numbers |= learned_later() | values("vector_head", ("base, 256", "binding", "phrases"))
    return changes, numbers | {f"{float(whole) - float(half):.1f}", *(text.split(" ± ")[0] for text in relations)}


def study_prose():
    "The sentences of the study without links"
    cells = read_json(ROOT / "nbs" / "study.ipynb")["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"\[[\d.]+\]|\(https?://[^)]*\)", "", prose)


@pytest.mark.parametrize(
    "prose, numbers, typed",
    [(lambda: PAGE, readme_numbers, TYPED), (study_prose, study_numbers, TYPED_IN_STUDY)],
    ids=["README", "study"],
)
def test_numbers_of_sentences(prose, numbers, typed):
    "Every decimal of the prose is one of the records', and each of these is there"
    text = prose()
    changes, others = numbers()
    assert not [change for change in changes if change not in text]

    lines = re.sub(r"```.*?```", "", text, flags=re.S).splitlines()
    printed = set(re.findall(r"\d+\.\d+", "\n".join(line for line in lines if line[:1] != "|")))
    wanted = {number for change in changes for number in change.split(" ± ")}
    assert printed - typed == (wanted | others | HERE) - typed
