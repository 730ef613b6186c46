"""README.md: sentences by hand, and every number of it in a record."""

import re

from conftest import ROOT

from c2lip.core.files import read_json
from c2lip.lab.evaluation.results import read_answers, read_record
from c2lip.lab.study.protocol import changes_by_score, read_scores
from c2lip.lab.training.step import BY_MODEL, WEIGHTS

PAGE = (ROOT / "README.md").read_text(encoding="utf8")
TYPED = {"3.11", "2.0", "2603.25722"}  # in no record: versions and the paper's number


def test_the_table_is_that_of_the_record():
    "What the index's cell makes of the records is what the page shows; a new record needs `make outputs ARGS=index`"
    (cell,) = [cell for cell in read_json(ROOT / "nbs" / "index.ipynb")["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    exec("".join(cell["source"]).replace("\nMarkdown(", "\nshown = Markdown("), names)
    assert names["shown"].data in PAGE and len(names["table"].rows) == 8


def change(answers, score, suite, row, before="plain", after="default"):
    "How far one model lies from another in a row, as the page prints it, without the sign"
    (found,) = changes_by_score(answers[before], answers[after], [(suite, row)], [score]).itertuples()
    return found.change.lstrip("+-")


def test_numbers_of_sentences():
    "Every decimal of the prose is one of the records', and each of these is there"
    rows = read_record("long_readouts").query("split == 'test' and score == 'both'")
    rows = rows.assign(model=rows.model.str.replace(r", seed \d+$", "", regex=True))
    by_vt = rows.groupby(["model", "suite", "name"]).before.mean()
    wanted = {f"{by_vt[model, 'binding', 'phrases']:.1f}" for model in ("plain", "+ npc + xac")}
    wanted |= {str(BY_MODEL["embedded"]["alpha"])}

    searched = read_record("search").query("images == 10_000").set_index("name").value
    wanted |= {f"{searched['R@10']:.1f}", f"{searched['R@10 by v·t']:.1f}", f"{searched['bytes an image'] / 1000:.1f}"}
    assert f"{searched['ms a query, median']:.0f} ms" in PAGE

    values = read_record("readings").groupby(["model", "suite", "name"]).value.mean()
    wanted |= {
        f"{values[key]:.1f}" for key in (("base", "zeroshot", "object"), ("default", "parts/zeroshot", "object"))
    }

    _, answers = read_scores()
    gains = [
        change(answers, "phrases", "binding", "phrases"),
        change(answers, "parts", "world_sugarcrepe_2", "binding"),
        change(answers, "v·t", "retrieval", "t2i R@1"),
        change(answers, "parts", "zeroshot", "object", "default", "xac"),
    ]
    worlds = ("worlds_photographs", "worlds_emoji", "worlds_frozen")
    gains += [change(read_answers(record), "parts", "binding", "phrases") for record in worlds]
    assert all(text in PAGE for text in gains), gains
    wanted |= {number for text in gains for number in text.split(" ± ")}

    wanted |= {f"{weight:g}" for weight in WEIGHTS["embedded"].values()}
    prose = "\n".join(line for line in re.sub(r"```.*?```", "", PAGE, flags=re.S).splitlines() if line[:1] != "|")
    found = set(re.findall(r"\d+\.\d+", prose))
    assert found - TYPED == wanted - TYPED
