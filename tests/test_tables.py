"""Tables: the launcher, the papers' layouts, the published figures."""

import html
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from markdown_it import MarkdownIt

from c2lip.core import one_line
from c2lip.core.files import read_yaml, shipped
from c2lip.lab.evaluation.published import layout_table, layouts, published, read_published, with_means
from c2lip.lab.evaluation.readers.composition import SUGARCREPE, SUGARCREPE_PP
from c2lip.lab.evaluation.report import Cell, Table, frame_table, pick_rows, row_list
from c2lip.lab.evaluation.results import read_answers, read_record, results_frame
from c2lip.lab.evaluation.scores import Hits, change_of_items, mean_of
from c2lip.lab.evaluation.suites import tabulate

# The paper's text (arXiv 2603.25722v1 as plain text), where a maintainer has it.
PAPER = Path(os.environ.get("C2LIP_PAPER", Path(__file__).parents[2] / "shared" / "papers" / "c2lip_paper.txt"))


def drawn(p, n=200, seed=0):
    "(table, hits) of a model that gets the share p of every task of SugarCrepe and SugarCrepe++ right"
    rng = np.random.default_rng(seed)
    keys = [
        *(("sugarcrepe", t) for t in SUGARCREPE),
        *(("sugarcrepe_pp", f"{t} {k}") for t in SUGARCREPE_PP for k in ("ITT", "TOT")),
    ]
    no = torch.zeros(n).bool()
    hits = {k: Hits(torch.from_numpy(rng.random(n) < p), no, no) for k in keys}
    for s in ("sugarcrepe", "sugarcrepe_pp"):
        hits[s, "average"] = mean_of([h for k, h in hits.items() if k[0] == s])
    return tabulate((s, name, h) for (s, name), h in hits.items()), hits


@pytest.fixture(scope="module")
def three():
    "Three models as a frame with the papers' means, and {name: hits}"
    made = {m: drawn(p) for m, p in (("base", 0.6), ("plain", 0.62), ("full & final_50%", 0.7))}
    hits = {m: h for m, (_, h) in made.items()}
    return with_means(results_frame({m: t for m, (t, _) in made.items()}, hits)), hits


def test_tables_fit_a_terminal(three):
    "The text of every kind of table: at most 80 characters a line, no empty line, every model and task in it"
    frame, _ = three
    world = pd.concat([read_record("world"), read_record("world", "changes")])
    trials = read_record("compare").query("weights == 'trained'")
    tables = [frame_table(world, "a caption " * 20), frame_table(pick_rows(trials, row_list("compare table")))]
    tables += [frame_table(frame[frame.model.isin(["base", "plain"])]), frame_table(frame)]
    tables += [layout_table(layout, frame) for layout in layouts()]
    for text in map(str, tables):
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80 and all(line.strip() for line in lines), text
        assert "nan" not in text

    assert all(word in str(tables[1]) for word in ("CLIC", "MACCO", "plain"))
    assert "swap attribute" in str(tables[2])


def test_two_machines_agree():
    "The ladder of five seeds and its repetition differ by less than their seeds do"
    assert sorted(read_record("ladder").seed.unique()) == [0, 1, 2, 3, 4]
    first, again = (read_record(name).groupby(["model", "suite", "name"]).value.mean() for name in ("ladder", "repeat"))
    for suite, name in row_list("ladder table"):
        for variant in ("base", "plain", "+ npc"):
            assert abs(first[variant, suite, name] - again[variant, suite, name]) < (0.01 if variant == "base" else 1.0)


@pytest.mark.parametrize("name", ["readings", "worlds_emoji", "worlds_photographs"])
def test_a_world_answers_the_claims(name):
    "The record of a world holds what data/worlds_rule.yaml judges of its models, by at least two seeds"
    answers = read_answers(name)
    claims = read_yaml(shipped("worlds_rule.yaml"))["claims"]
    judged = [claim for claim in claims if set(claim[4:6]) <= answers.keys()]
    assert len(judged) >= 8
    assert all(len(answers[model]) > 1 for model in ("plain", "default"))
    for _, score, suite, row, *models, _, _ in judged:
        key = ("parts/" * (score == "parts") + suite, row)
        assert all(key in items for model in models for items in answers[model].values())


# --- the papers' layouts


@pytest.mark.parametrize("layout", [n for n in layouts() if n.startswith("C2LIP")])
def test_every_cell_of_the_paper_has_a_place(layout):
    "The layout's columns and the published figures of that table are the same set, for every row"
    rows = published(layout)
    want = set(layouts()[layout].values())
    assert len(rows)
    assert all(set(zip(r["suite"], r["name"])) == want for _, r in rows.groupby("model"))


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's text is not here; set C2LIP_PAPER to the file")
def test_published_has_every_figure_of_the_paper():
    "The numbers with one decimal between a table's caption and the next, against those of the file: the same, as often"
    lines = PAPER.read_text(encoding="utf8").splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(r"Table A?\d+:", line)]
    figures = read_published()
    checked = 0
    for i, end in zip(heads, [*heads[1:], len(lines)]):
        name = lines[i].split(":")[0]
        if name in ("Table 1", "Table A1", "Table A2"):
            continue  # training data; A2's weights are no results
        body = [
            re.sub(r"\([+-][\d.]+\)", "", line).replace("\\ul", " ") for line in lines[i + 1 : end] if len(line) < 250
        ]
        body = [line for line in body if not re.match(r"\s*[\dA]\.\d", line)]
        found = Counter(float(x) for line in body for x in re.findall(r"(?<![\w./-])\d{1,3}\.\d(?!\d)", line))
        ours = Counter(figures[figures.paper.str.startswith("C2LIP") & (figures.table == name)].value)
        if name == "Table 6":
            found = Counter({v: n for v, n in found.items() if v in ours})  # the list of references follows
        assert ours - found == Counter() and found - ours == Counter(), name
        checked += sum(ours.values())

    assert checked == 273 + 77 + 91 + 36 + 28 + 231 + 315 + 189 + 252


def test_layout_values_and_changes(three):
    frame, hits = three
    table = layout_table("C2LIP Table 3", frame)
    edits = ("replace", "swap")
    names = [("sugarcrepe", f"{e}_att") for e in edits]
    names += [("sugarcrepe_pp", f"{e}_att {t}") for e in edits for t in ("ITT", "TOT")]
    values = frame[frame.against == ""].set_index(["model", "suite", "name"]).value
    mean = {m: float(np.mean([values[m, *key] for key in names])) for m in hits}
    change, se, _ = change_of_items(*(mean_of([hits[m][key] for key in names]) for m in ("base", "plain")))
    cell = table.cells[table.rows.index(("Ours", "plain"))][-1]

    assert cell.value == f"{mean['plain']:.1f}"
    assert change == pytest.approx(mean["plain"] - mean["base"])
    assert cell.small == f"{change:+.1f} ± {1.96 * se:.1f}"


def test_foreign_names_stay_in_their_cells():
    "Whatever letters a name has, Markdown and LaTeX show them, and no tag, cell or command more"
    render = MarkdownIt("commonmark", {"html": True}).enable("table").render
    draw = np.random.default_rng(0)

    for _ in range(200):
        names = ["".join(draw.choice([*"<>&\\|\n\x1b{}$a;/ ", "<script>", "&amp;"], 9)) for _ in range(3)]
        table = Table([("", names[0])], [("", names[1])], [[Cell(names[2])]])
        page = render(table.markdown())
        assert set(re.findall(r"<(\w+)", page)) <= {*"table thead tbody tr th td".split()}
        cells = [html.unescape(cell).strip() for cell in re.findall(r"<t[hd]>(.*)</t[hd]>", page)]
        assert cells == ["", *(one_line(names[i]).strip() for i in (1, 0, 2))]
        latex = table.texts().to_latex(escape=True, index=False)
        assert set(re.findall(r"\\([a-z]+)", latex)) <= {
            *"begin end toprule midrule bottomrule textbackslash space".split()
        }


def test_forms_of_a_table(three):
    "The best is bold once a column and group; names are escaped; every line has all columns; the same page each time"
    table = layout_table("C2LIP Table A3", three[0])
    text = table.markdown()
    page = table._repr_html_()
    assert "full &amp; final_50%" in page
    assert ">nan" not in page.lower()
    assert "nan" not in text.lower()
    assert {line.count("|") for line in text.splitlines()} == {13}  # two names and eleven columns
    assert page == layout_table("C2LIP Table A3", three[0])._repr_html_()

    for column in range(len(table.heads)):
        for group in ("Ours", "Published"):
            cells = [row[column] for (own, _), row in zip(table.rows, table.cells) if own == group]
            top = max(float(cell.value) for cell in cells)
            assert all(cell.best == (float(cell.value) == top) for cell in cells), table.heads[column]


# --- published.csv


@pytest.fixture(scope="module")
def figures():
    return read_published()


def test_published_is_whole(figures):
    columns = "paper table model backbone training_data benchmark subtask metric value note"
    assert figures.columns.tolist() == columns.split()
    assert figures.value.between(0, 100).all()
    assert not figures.duplicated(["paper", "table", "model", "backbone", "benchmark", "subtask", "metric"]).any()
    c2lip = figures[figures.paper.str.startswith("C2LIP")]
    assert (len(c2lip), c2lip.table.nunique()) == (1497, 10)


def test_published_contradictions_are_marked(figures):
    "A figure that two tables of the C2LIP paper give differently says so on both lines; nothing else does"
    paper = figures[figures.paper.str.startswith("C2LIP")]
    for key, r in paper.groupby(["model", "backbone", "benchmark", "subtask", "metric"]):
        assert r.note.str.contains("contradicted").all() == (r.value.nunique() > 1), key
    assert paper[paper.note.str.contains("contradicted") & (paper.model == "TripletCLIP")].shape[0] == 4
