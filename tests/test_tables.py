"""Tables and their statistics: intervals against theory, the papers' tables cell by cell, the files, the launcher."""

import json
import math
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from c2lip.core import UserError
from c2lip.evaluation.changes import before_after, compare_table, name_models
from c2lip.evaluation.folders import benchmark_folder
from c2lip.evaluation.plots import plot_pareto, plot_radar
from c2lip.evaluation.published import lay_out, layouts, paper_rows, published, read_published, with_means
from c2lip.evaluation.records import read_record
from c2lip.evaluation.scores import Hits, mean_of, score
from c2lip.evaluation.seeds import pick_rows, row_list, side_by_side, summarise
from c2lip.evaluation.suites import evaluate, tabulate
from c2lip.evaluation.tables import show_rows, show_table, show_texts
from c2lip.evaluation.uncertainty import bootstrap, interval, sign_test, standard_error, with_errors
from c2lip.evaluation.world_benchmark import SUGARCREPE, SUGARCREPE_PP
from c2lip.evaluation.writing import ShownLayout, printed_rows, to_great_table, write_tables
from c2lip.study.ladder import DEFAULT_RUNG
from c2lip.towers import load
from c2lip.training.config import BY_MODEL

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
    "Three models: {name: table}, {name: hits}"
    made = {m: drawn(p) for m, p in (("base", 0.6), ("plain", 0.62), ("full & final_50%", 0.7))}
    return {m: t for m, (t, _) in made.items()}, {m: h for m, (_, h) in made.items()}


def test_launcher(run, tmp_path):
    "papermill leaves the rows that `evaluate` gives and every paper's table that has one of them"
    words = "-p models base,again=base -p items 6 -p bench_images 30 -p suites sugarcrepe,zeroshot".split()
    words += ["-p", "split", "validation"]
    done = run("papermill", "nbs/evaluate.ipynb", *words, "-p", "run_dir", tmp_path / "a")
    assert done.returncode == 0, done.out
    assert (
        "SugarCrepe" in done.out
        and "change" in done.out
        and "C2LIP (published)" in done.out
        and "nothing of these was measured: C2LIP Table A4" in done.out
    )
    assert "Unable to parse" not in done.out and "unknown parameter" not in done.out
    files = [
        f"{name}.{kind}"
        for name in (
            "c2lip_table_2",
            "c2lip_table_3",
            "c2lip_table_5",
            "c2lip_table_a3",
            "macco_main_results",
            "the_embedded_world",
        )
        for kind in ("csv", "html", "md", "tex")
    ]
    assert {p.name for p in (tmp_path / "a").iterdir()} >= {
        "params.json",
        "table.csv",
        "table.html",
        "changes_again.png",
        "radar.png",
        "evaluate.ipynb",
        *files,
    }
    mine = evaluate(
        load("base"),
        benchmark_folder("world", "validation", items=6, images=30),
        ["sugarcrepe", "zeroshot"],
        progress=False,
    )
    rows = pd.read_csv(tmp_path / "a" / "table.csv")
    for m in ("base", "again"):
        part = rows[rows.model == m]
        assert part.value.tolist() == pytest.approx(mine.value.tolist()) and part.n.tolist() == mine.n.tolist()
    assert (rows[rows.model == "again"][["change", "low", "high"]] == 0).all().all()
    assert json.loads((tmp_path / "a" / "params.json").read_text())["models"] == ["base", "again=base"]


def test_tables_fit_a_terminal(three):
    "The text of every kind of table: at most 80 characters a line, no empty line, every model and task in it"
    world, trials = read_record("world"), read_record("compare")
    tables, hits = three
    last = list(tables)[-1]
    change = before_after(tables["base"], tables[last], hits["base"], hits[last])
    trials = trials[(trials.budget == "steps") & (trials.weights == "trained")]
    texts = side_by_side(pick_rows(summarise(trials), row_list("compare table"), also=""))
    shown = [show_rows(world, "a caption " * 20), show_texts(texts, "means"), show_table(change, "base → last")]
    shown += [
        show_table(compare_table(tables)),
        show_table(compare_table({f"{i} {last}": tables[last] for i in "abc"})),
    ]
    shown += [ShownLayout(lay_out(layout, tables, hits)) for layout in layouts()]
    for text in map(str, shown):
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80 and all(line.strip() for line in lines), text
        assert "Styler" not in text and "…" not in text
    assert all(method in str(shown[1]) for method in trials.model.unique())
    assert "swap attribute" in str(shown[2]) and "(too wide for a terminal: ties before, ties after)" in str(shown[2])


def test_the_ladder_says_where_it_comes_from():
    "Five seeds of every rung on the test split, with command, commit and machine"
    root = Path(__file__).parents[1] / "data" / "results"
    found = read_record("ladder")
    seeds = found[found.model != "base"].groupby("model").seed.unique().map(sorted)
    assert list(seeds.index) == ["+ npc", "+ npc + xac, β 1", "+ npc + xac, β 10", "plain"]
    assert all(own == [0, 1, 2, 3, 4] for own in seeds)
    made = json.loads((root / "ladder" / "record.json").read_text())
    assert "split test" in made["command"] and made["commit"] and made["machine"]["cpu"]


def test_the_default_is_the_chosen_share():
    "train.ipynb's share is the default rung's, and the best of record interpolation"
    sweep = read_record("interpolation")
    assert sweep.alpha[sweep.composition.idxmax()] == BY_MODEL["embedded"]["alpha"] == 0.4
    assert DEFAULT_RUNG.endswith("α 0.4")
    again = read_record("repeat")
    assert sorted(again[again.model == "+ npc + xac, α 0.4"].seed.unique()) == [0, 1, 2, 3, 4]


def test_two_machines_agree():
    "The ladder and its repetition differ by less than their seeds do"
    first, again = (read_record(name).groupby(["model", "suite", "name"]).value.mean() for name in ("ladder", "repeat"))
    rows = [row for row in row_list("ladder table") if row[0] != "size_and_place"]  # both are older than that suite
    for suite, name in rows:
        for rung in ("base", "plain", "+ npc"):
            assert abs(first[rung, suite, name] - again[rung, suite, name]) < (0.01 if rung == "base" else 1.0)


# --- the papers' layouts


@pytest.mark.parametrize("layout", [n for n in layouts() if n.startswith("C2LIP")])
def test_every_cell_of_the_paper_has_a_place(layout):
    "The layout's columns and the published figures of that table are the same set, for every row"
    rows = paper_rows(layout)
    want = {key for _, _, key in layouts()[layout]}
    assert rows and all(set(cells) == want for cells in rows.values())


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's text is not here; set C2LIP_PAPER to the file")
def test_published_has_every_figure_of_the_paper():
    "The numbers with one decimal between a table's caption and the next, against those of the file: the same, as often"
    lines = PAPER.read_text(encoding="utf8").splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(r"Table A?\d+:", line)]
    figures, checked = read_published(), 0
    for i, end in zip(heads, [*heads[1:], len(lines)]):
        name = lines[i].split(":")[0]
        if name in ("Table 1", "Table A1", "Table A2"):
            continue  # training data; A2's weights are no results
        body = [
            re.sub(r"\([+-][\d.]+\)", "", line)
            for line in lines[i + 1 : end]
            if len(line) < 250 and not re.match(r"\s*[\dA]\.\d", line)
        ]
        found = Counter(
            float(x) for line in body for x in re.findall(r"(?<![\w./-])\d{1,3}\.\d(?!\d)", line.replace("\\ul", " "))
        )
        ours = Counter(figures[figures.paper.str.startswith("C2LIP") & (figures.table == name)].value)
        if name == "Table 6":
            found = Counter(
                {v: n for v, n in found.items() if v in ours}
            )  # the list of references follows, with its sections
        assert ours - found == Counter() and found - ours == Counter(), name
        checked += sum(ours.values())
    assert checked == 273 + 77 + 91 + 36 + 28 + 231 + 315 + 189 + 252


def test_layout_values_and_changes(three):
    tables, hits = three
    laid = lay_out("C2LIP Table 3", tables, hits).query("source == 'ours'")
    row = laid[(laid.model == "plain") & (laid.column == "Average")].iloc[0]
    names = [
        ("sugarcrepe", "replace_att"),
        ("sugarcrepe", "swap_att"),
        *(("sugarcrepe_pp", f"{e}_att {t}") for e in ("replace", "swap") for t in ("ITT", "TOT")),
    ]
    mean = {m: float(np.mean([t.set_index(["suite", "name"]).value[k] for k in names])) for m, t in tables.items()}
    assert row.value == pytest.approx(mean["plain"]) and row.change == pytest.approx(mean["plain"] - mean["base"])
    low, high = bootstrap([hits["base"][k].correct for k in names], [hits["plain"][k].correct for k in names])
    assert (row.change_low, row.change_high) == pytest.approx((low, high)) and row.n == 6 * 200
    nested = with_means(*(x["base"] for x in three))[1]["sugarcrepe", "replace"]
    assert score("", nested).value == pytest.approx(tables["base"].value[:3].mean())


def test_weighted_interval_equals_a_slow_one(three):
    "A mean with unequal weights: draw the items themselves"
    h = [three[1]["base"]["sugarcrepe", t] for t in ("swap_obj", "swap_att", "add_obj")]
    mean = mean_of([h[0], mean_of(h[1:])])
    assert mean.weights == [0.5, 0.25, 0.25]
    rng = np.random.default_rng(1)
    slow = sum(
        w * 100 * np.array([x.correct.numpy()[rng.integers(0, 200, 200)].mean() for _ in range(4000)])
        for x, w in zip(mean.parts, mean.weights)
    )
    assert interval(mean) == pytest.approx(np.quantile(slow, [0.025, 0.975]), abs=0.5)
    assert 1.96 * standard_error(mean) == pytest.approx((np.subtract(*interval(mean)[::-1])) / 2, rel=0.06)


def test_files_of_a_table(three, tmp_path):
    laid = lay_out("C2LIP Table A3", *three)
    names = [f.name for f in write_tables(laid, tmp_path)]
    assert names == [f"c2lip_table_a3.{k}" for k in ("csv", "html", "md", "tex")]
    text = {f.suffix: f.read_text(encoding="utf8") for f in tmp_path.iterdir()}
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "c2lip_table_a3.csv", keep_default_na=True)[["model", "value"]], laid[["model", "value"]]
    )
    assert (
        r"full \& final\_50\%" in text[".tex"]
        and text[".tex"].count(r"\begin{tabular*}") == 1
        and "full &amp; final_50%" in text[".html"]
    )
    widths = {
        line.replace(r"\&", "").count("&")
        for line in text[".tex"].split(r"\toprule")[1].split(r"\bottomrule")[0].splitlines()
        if line.rstrip().endswith(r"\\") and "multicolumn" not in line
    }
    assert widths == {11}  # a name and eleven columns in every line
    assert {line.count("|") for line in text[".md"].splitlines() if line.startswith("|")} == {13}
    assert "\u2013" not in text[".tex"] and "nan" not in text[".md"].lower() and ">nan" not in text[".html"].lower()
    assert (
        to_great_table(laid).as_raw_html() == to_great_table(laid).as_raw_html()
    )  # the same table gives the same page


def test_best_is_bold_once_a_column_and_group(three):
    rows, heads = printed_rows(lay_out("C2LIP Table A3", *three))
    for i, head in enumerate(heads):
        for source in ("ours", "published"):
            cells = [row.cells[i] for row in rows if row.source == source]
            shown = [(float(cell.value), cell.best) for cell in cells]
            top = max(v for v, _ in shown)
            assert all(bold == (v == top) for v, bold in shown), head


def test_names_of_models():
    for wrong in ([""], ["a=x", "a=y"], ["name="]):
        with pytest.raises(UserError):
            name_models(wrong)


def test_the_stored_table_is_whole():
    rows = read_record("world")
    assert (
        list(dict.fromkeys(rows.model)) == ["base", "plain", "C2LIP"]
        and (rows.groupby("model").size() == rows.groupby("model").size().iloc[0]).all()
    )
    tuned = rows[rows.model != "base"]
    assert (
        tuned[["change", "low", "high"]].notna().all().all()
        and (tuned.low <= tuned.change + 0.01).all()
        and (tuned.change <= tuned.high + 0.01).all()
    )
    assert "C2LIP: change" in str(show_rows(rows))


def test_images_draw(three, tmp_path):
    tables, hits = three
    plot_radar(tables, [("sugarcrepe", t) for t in SUGARCREPE]).savefig(tmp_path / "r.png")
    plot_pareto(tables, ("sugarcrepe", "average"), ("sugarcrepe_pp", "average"), hits).savefig(tmp_path / "f.png")
    assert min(f.stat().st_size for f in tmp_path.iterdir()) > 10_000
    with pytest.raises(UserError, match="no model has both"):
        plot_pareto(tables, ("aro", "order"), ("sugarcrepe", "average"))


# --- statistics


def test_bootstrap_covers():
    "The interval of a change holds the true change about as often as it says"
    rng, held = np.random.default_rng(0), 0
    for i in range(300):
        a = torch.from_numpy(rng.random(300) < 0.6)
        flip = torch.from_numpy(rng.random(300) < 0.1)
        b = torch.where(flip, ~a, a)  # true change: .1·(.4 − .6) = −2 points
        low, high = bootstrap([a], [b], samples=1000, seed=i)
        held += low <= -2 <= high
    assert 0.90 <= held / 300 <= 0.98


def test_sign_test_equals_the_binomial():
    for gain, loss in ((0, 0), (3, 3), (10, 2), (400, 350)):
        before = torch.cat([torch.zeros(gain), torch.ones(loss), torch.ones(5)]).bool()
        after = torch.cat([torch.ones(gain), torch.zeros(loss), torch.ones(5)]).bool()
        tail = sum(math.comb(gain + loss, i) for i in range(min(gain, loss) + 1))
        assert sign_test(before, after) == pytest.approx(min(1.0, 2 * tail / 2 ** (gain + loss)))


def test_tables_show(three):
    tables, hits = three
    t, h = tables["base"], hits["base"]
    for frame in (
        t,
        with_errors(t, h),
        compare_table(tables),
        before_after(t, tables["plain"]),
        before_after(t, tables["plain"], h, hits["plain"]),
    ):
        html = show_table(frame, "words").to_html()
        assert "SugarCrepe++" in html and "words" in html and "nan" not in html.lower().replace("nan_", "")
    same = before_after(t, t, h, h)
    assert (same.change == 0).all() and (same.low == 0).all()
    assert with_errors(t, h).se[:7].tolist() == pytest.approx(
        [100 * math.sqrt(v / 100 * (1 - v / 100) / 200) for v in t.value[:7]]
    )
    with pytest.raises(UserError, match="different benchmarks"):
        compare_table({"a": t, "b": t.assign(n=3)})


# --- published.csv


@pytest.fixture(scope="module")
def figures():
    return read_published()


def test_published_is_whole(figures):
    assert (
        figures.columns.tolist()
        == "paper table model backbone training_data benchmark subtask metric value note".split()
    )
    assert figures.value.between(0, 100).all()
    assert not figures.duplicated(["paper", "table", "model", "backbone", "benchmark", "subtask", "metric"]).any()
    c2lip = figures[figures.paper.str.startswith("C2LIP")]
    assert c2lip.table.value_counts().to_dict() == {
        "Table 2": 21 * 13,
        "Table 3": 11 * 7,
        "Table 4": 7 * 13,
        "Table 5": 4 * 9,
        "Table 6": 4 * 7,
        "Table A2": 5,
        "Table A3": 21 * 11,
        "Table A4": 21 * 15,
        "Table A5": 21 * 9,
        "Table A6": 21 * 12,
    }


def means(figures, table, benchmark, whole, parts, metric=None, weights=None):
    "(model, printed mean, mean of its parts) of every row of a table"
    rows = figures[(figures.table == table) & figures.paper.str.startswith("C2LIP")]
    for (model, _), r in rows.groupby(["model", "backbone"]):
        value = {(b, s, m): v for b, s, m, v in zip(r.benchmark, r.subtask, r.metric, r.value)}
        got = [value[p] for p in parts]
        yield model, value[whole], float(np.average(got, weights=weights))


SEVEN = [("sugarcrepe", s, "accuracy") for s in SUGARCREPE]
TEN = [("sugarcrepe_pp", s, m) for s in SUGARCREPE_PP for m in ("ITT", "TOT")]
TWELVE = [
    *(("sugarcrepe", s, "accuracy") for s in ("add", "replace", "swap")),
    *(("sugarcrepe_pp", s, m) for s in ("replace", "swap") for m in ("ITT", "TOT")),
    ("imagenet1k", "", "top-1"),
    *((b, "", "R@5 mean") for b in ("flickr30k", "mscoco", "docci", "iiw")),
]
ZERO = "imagenet1k food101 cifar10 cifar100 sun397 cars aircraft dtd pets caltech101 flowers".split()


@pytest.mark.parametrize(
    "table, whole, parts, weights",
    [
        ("Table A3", ("sugarcrepe", "average", "accuracy"), SEVEN, None),
        ("Table 5", ("sugarcrepe", "average", "accuracy"), SEVEN, None),
        ("Table A4", ("sugarcrepe_pp", "average", "mean"), TEN, None),
        ("Table 2", ("all", "", "mean of 12"), TWELVE, None),
        ("Table 4", ("all", "", "mean of 12"), TWELVE, None),
        (
            "Table 3",
            ("attributes", "", "mean of 6"),
            [
                *(("sugarcrepe", f"{e}_att", "accuracy") for e in ("replace", "swap")),
                *(("sugarcrepe_pp", f"{e}_att", m) for e in ("replace", "swap") for m in ("ITT", "TOT")),
            ],
            None,
        ),
        (
            "Table A5",
            ("retrieval", "", "mean of 8"),
            [(b, "", f"{d} R@5") for b in ("mscoco", "flickr30k", "docci", "iiw") for d in ("t2i", "i2t")],
            None,
        ),
        ("Table A6", ("zeroshot", "", "mean of 11"), [(b, "", "top-1") for b in ZERO], None),
        (
            "Table 6",
            ("sugarcrepe", "average", "accuracy"),
            [("sugarcrepe", e, "accuracy") for e in ("replace", "swap", "add")],
            (3, 2, 2),
        ),
        (
            "Table 6",
            ("sugarcrepe_pp", "average", "ITT"),
            [("sugarcrepe_pp", e, "ITT") for e in ("replace", "swap")],
            (3, 2),
        ),
        *(
            ("Table A3", ("sugarcrepe", e, "accuracy"), [("sugarcrepe", f"{e}_{x}", "accuracy") for x in k], None)
            for e, k in (("replace", ("obj", "att", "rel")), ("swap", ("obj", "att")), ("add", ("obj", "att")))
        ),
        *(
            ("Table A4", ("sugarcrepe_pp", e, m), [("sugarcrepe_pp", f"{e}_{x}", m) for x in k], None)
            for m in ("ITT", "TOT")
            for e, k in (("replace", ("obj", "att", "rel")), ("swap", ("obj", "att")))
        ),
    ],
)
def test_published_averages(figures, table, whole, parts, weights):
    "Printed averages are the means of their rows, to the rounding of the figures"
    for model, printed, mean in means(figures, table, whole[0], whole, parts, weights=weights):
        assert abs(printed - mean) <= 0.1001, (table, model, printed, mean)


def test_published_contradictions_are_marked(figures):
    "A figure that two tables of the C2LIP paper give differently says so on both lines; nothing else does"
    paper = figures[figures.paper.str.startswith("C2LIP")]
    for key, r in paper.groupby(["model", "backbone", "benchmark", "subtask", "metric"]):
        assert r.note.str.contains("contradicted").all() == (r.value.nunique() > 1), key
    assert paper[paper.note.str.contains("contradicted") & (paper.model == "TripletCLIP")].shape[0] == 4


def test_published_figures_of_the_brief(figures):
    "Spot checks against figures typed by hand"

    def row(model, suite, **k):
        p = published(model, **k)
        return dict(zip(p.name[p.suite == suite], p.value[p.suite == suite]))

    want = dict(zip(SUGARCREPE + ("average",), (95.3, 86.7, 70.3, 60.0, 71.5, 89.1, 83.8, 79.5)))
    got = row("SigLIP", "sugarcrepe")
    assert {k: got[k] for k in want} == want
    got = row("C2LIP", "sugarcrepe_pp")
    assert [
        got[f"{e}_{x} {m}"]
        for e, k in (("replace", ("obj", "att", "rel")), ("swap", ("obj", "att")))
        for m in ("ITT", "TOT")
        for x in k
    ] == [93.9, 79.8, 65.4, 91.1, 80.2, 54.7, 44.1, 66.2, 28.6, 59.8] and got["average"] == 66.4
    got = row("CLIP", "sugarcrepe", backbone="ViT-B/32")
    assert (got["replace_obj"], got["average"]) == (90.9, 73.1)
    assert row("C2LIP", "mscoco")["t2i R@5"] == 77.9 and row("C2LIP", "flickr8k")["R@5 mean"] == 96.4
    ablation = figures[figures.table == "Table A2"]
    assert ablation.value.tolist() == [84.6, 85.2, 85.2, 85.1, 85.6]
    macco = figures[
        figures.paper.str.startswith("MACCO") & (figures.model == "MACCO") & (figures.table == "main results")
    ]
    assert macco.value.tolist() == [73.1, 68.5, 76.0, 77.1, 70.2, 75.3]
