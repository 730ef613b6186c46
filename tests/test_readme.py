"""README.md: sentences by hand, and every number of it in a record."""

import re

from conftest import ROOT

from c2lip.core.files import read_json
from c2lip.lab.evaluation.results import item_changes, read_answers, read_record, summarise
from c2lip.lab.training.step import BY_MODEL, WEIGHTS

PAGE = (ROOT / "README.md").read_text(encoding="utf8")
TYPED = {"3.11", "2.0", "2603.25722", "7.2"}  # in no record: versions and commands


def test_the_table_is_that_of_the_record():
    "What the index's cell makes of the record is what the page shows; a new record needs `make outputs ARGS=index`"
    (cell,) = [cell for cell in read_json(ROOT / "nbs" / "index.ipynb")["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    exec("".join(cell["source"]).replace("\nMarkdown(", "\nshown = Markdown("), names)
    assert names["shown"].data in PAGE and len(names["table"].rows) == 11


def test_numbers_of_sentences():
    "Every decimal of the prose is one of the records', and each of these is there"
    rows = read_record("long_readouts").query("split == 'test' and score == 'both'")
    rows = rows.assign(model=rows.model.str.replace(r", seed \d+$", "", regex=True))
    by_vt = rows.groupby(["model", "suite", "name"]).before.mean()
    wanted = set()
    for model in ("plain", "+ npc + xac"):
        for row in (("binding", "phrases"), ("retrieval", "i2t R@1")):
            wanted.add(f"{by_vt[model, *row]:.1f}")
    wanted |= {str(BY_MODEL["embedded"]["alpha"])}

    searched = read_record("search").query("images == 10_000").set_index("name").value
    wanted |= {f"{searched['R@10']:.1f}", f"{searched['R@10 by v·t']:.1f}", f"{searched['bytes an image'] / 1000:.1f}"}
    assert f"{searched['ms a query, median']:.0f} ms" in PAGE

    values = read_record("readings").groupby(["model", "suite", "name"]).value.mean()
    shown = [("base", ""), ("base", "parts/"), ("default", "parts/")]
    wanted |= {f"{values[model, score + 'world_sugarcrepe_2', 'average']:.1f}" for model, score in shown}
    wanted |= {f"{values['default', 'parts/doubts', name]:.1f}" for name in ("sizes exchanged", "one or two")}

    average, binding = ("parts/world_sugarcrepe_2", "average"), ("parts/binding", "phrases")
    for record in ("readings", "worlds_emoji", "worlds_photographs", "worlds_frozen"):
        answers = read_answers(record)
        changes = summarise(item_changes(answers["plain"], answers["default"]).assign(model=""))
        changes = changes.set_index(["suite", "name"])
        rows = (average, binding) if record == "readings" else (binding,)
        wanted |= {f"{column[row]:.1f}" for row in rows for column in (changes["mean"], changes.half)}
    wanted |= {f"{weight:g}" for weight in WEIGHTS["embedded"].values()}
    prose = "\n".join(line for line in re.sub(r"```.*?```", "", PAGE, flags=re.S).splitlines() if line[:1] != "|")
    found = set(re.findall(r"\d+\.\d+", prose))
    assert found - TYPED == wanted
