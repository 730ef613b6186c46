"""The protocol of the study, to its last line, and what its records must agree in."""

from functools import partial

import pandas as pd

from c2lip.core.files import read_json
from c2lip.lab.evaluation.results import FRAME, keep_record, read_answers, read_record
from c2lip.lab.study import protocol
from c2lip.lab.study.protocol import SCORES, by_score
from c2lip.lab.world.twins import HALVES, KINDS

SMALL = dict(model="base", steps=1, pairs=200, images=64, items=30, bench_images=60)


def test_a_record_of_one_step(tmp_path, monkeypatch):
    "`make_record` to its last line: tables, question and the command as it is typed"
    monkeypatch.setattr(protocol, "keep_record", partial(keep_record, folder=tmp_path))
    page, losses = "9_study/04_three_scores", ["plain"]
    kept = protocol.make_record("one_step", page, "Does it end?", str(tmp_path / "run"), losses, [1], **SMALL)
    about = read_json(kept / "record.json")
    assert about["question"] == "Does it end?"
    settings = "-p model base -p steps 1 -p pairs 200 -p images 64 -p items 30 -p bench_images 60"
    lists = """-y '{"losses": ["plain"], "seeds": [1]}'"""
    assert about["command"] == f"papermill nbs/{page}.ipynb -p record one_step {settings} {lists}"

    trials = pd.read_csv(kept / "trials.csv")
    assert trials.columns.tolist() == FRAME
    assert set(trials.model) == {"base", "plain", "blind", "bag of words"}
    halves = [("world_sugarcrepe_2", half) for half in HALVES]
    for score in SCORES:
        assert len(by_score(trials[trials.model == "plain"], score, halves)) == 2, score
    answers = read_answers("one_step", tmp_path)["plain"][1]
    assert answers.keys() >= {("world_sugarcrepe_2", name) for name in (*HALVES, *KINDS)}
    assert {suite.removesuffix("doubts") for suite, _ in answers if "doubts" in suite} == {
        *SCORES.values(),
        "shuffled/",
    }

    choices = pd.read_csv(kept / "choices.csv")
    assert choices.model.tolist() == ["base", "base", "plain", "plain"]
    assert set(choices[choices.score == "phrases"].patches) == {"best"}


def test_the_ladder_was_repeated():
    "On another machine each mean lies within 0.6 points"
    means = [read_record(record).groupby(["model", "suite", "name"]).value.mean() for record in ("ladder", "repeat")]
    differences = (means[0] - means[1]).dropna().abs()
    assert len(differences) == 66 and differences.max() < 0.6
