"""Tables: the launcher, the papers' layouts, the published figures."""

import hashlib
import html
import re

import numpy as np
import pandas as pd
import pytest
import torch
from markdown_it import MarkdownIt

from c2lip.core import one_line
from c2lip.core.files import shipped
from c2lip.lab.evaluation.published import layout_table, layouts, published, read_published, with_means
from c2lip.lab.evaluation.readers.composition import SUGARCREPE, SUGARCREPE_PP
from c2lip.lab.evaluation.report import Cell, Table, frame_table, pick_rows, row_list
from c2lip.lab.evaluation.results import change_text, item_changes, read_record, results_frame
from c2lip.lab.evaluation.scores import Hits, half_width, mean_of
from c2lip.lab.evaluation.suites import tabulate


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
    "Three models as a frame with the papers' means"
    made = {m: drawn(p) for m, p in (("base", 0.6), ("plain", 0.62), ("full & final_50%", 0.7))}
    hits = {m: h for m, (_, h) in made.items()}
    return with_means(results_frame({m: t for m, (t, _) in made.items()}, hits))


def test_tables_fit_a_terminal(three):
    "The text of every kind of table: at most 80 characters a line, no empty line, every model and task in it"
    world = pd.concat([read_record("world"), read_record("world", "changes")])
    trials = read_record("compare").query("weights == 'trained'")
    tables = [frame_table(world, "a caption " * 20), frame_table(pick_rows(trials, row_list("compare record")))]
    tables += [frame_table(three[three.model.isin(["base", "plain"])]), frame_table(three)]
    tables += [layout_table(layout, three) for layout in layouts()]
    for text in map(str, tables):
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80 and all(line.strip() for line in lines), text
        assert "nan" not in text

    assert all(word in str(tables[1]) for word in ("CLIC", "MACCO", "plain"))
    assert "swap attribute" in str(tables[2])


# --- the papers' layouts


@pytest.mark.parametrize("layout", [n for n in layouts() if n.startswith("C2LIP")])
def test_every_cell_of_the_paper_has_a_place(layout):
    "The layout's columns and the published figures of that table are the same set, for every row"
    rows = published(layout)
    want = set(layouts()[layout].values())
    assert len(rows)
    assert all(set(zip(r["suite"], r["name"])) == want for _, r in rows.groupby("model"))


def test_a_change_in_a_layout_is_the_paired_change(three):
    "What stands beside a task of a compared model is the mean of its items' changes from the first"
    table = layout_table("C2LIP Table A3", three)
    changes = item_changes({0: drawn(0.6)[1]}, {0: drawn(0.7)[1]}).set_index(["suite", "name"])
    cells = table.cells[table.rows.index(("Ours", "full & final_50%"))]
    tasks = [(cell, key) for cell, key in zip(cells, layouts()["C2LIP Table A3"].values()) if key in changes.index]
    assert len(tasks) == 8
    for cell, key in tasks:
        change = changes.loc[key]
        assert cell.small == change_text(change.value, half_width(change.se, change.n)), key


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
    table = layout_table("C2LIP Table A3", three)
    text = table.markdown()
    page = table._repr_html_()
    assert "full &amp; final_50%" in page
    assert ">nan" not in page.lower()
    assert "nan" not in text.lower()
    assert {line.count("|") for line in text.splitlines()} == {13}  # two names and eleven columns
    assert page == layout_table("C2LIP Table A3", three)._repr_html_()

    for column in range(len(table.heads)):
        for group in ("Ours", "Published"):
            cells = [row[column] for (own, _), row in zip(table.rows, table.cells) if own == group]
            top = max(float(cell.value) for cell in cells)
            assert all(cell.best == (float(cell.value) == top) for cell in cells), table.heads[column]


# --- published.csv


# Of the lines of the C2LIP paper (arXiv 2603.25722v1). Each figure was compared with the paper's text, and those that
# two of its tables give differently were marked, by the tests of commit 3e42fc4d. Other papers' lines may be added
PAPER = "cb01f0ba4a1181a0614e7b530f3ebde154315e55689cc2b1cf8a0ea2fd0b4fac"


def test_published_is_whole():
    figures = read_published()
    columns = "paper table model backbone training_data benchmark subtask metric value note"
    assert figures.columns.tolist() == columns.split()
    assert figures.value.between(0, 100).all()
    assert not figures.duplicated(["paper", "table", "model", "backbone", "benchmark", "subtask", "metric"]).any()


def test_figures_of_the_paper_are_those_that_were_compared_with_it():
    lines = shipped("published.csv").read_text(encoding="utf8").splitlines(keepends=True)
    paper = "".join(line for line in lines if line.startswith("C2LIP"))
    assert hashlib.sha256(paper.encode()).hexdigest() == PAPER
