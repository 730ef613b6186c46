"""README.md: sentences by hand, every number of it in a record, and short."""

import re
from pathlib import Path

import pytest

from c2lip.evaluation.records import read_record

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "README.md").read_text(encoding="utf8")
# numbers that no record knows: versions, sizes, commands, β and α as they are chosen
TYPED = {"3.11", "2.0", "2603.25722", "7.2", "0.4"}
LONG = "+ npc + xac"


def mean(record, model, suite, name, column="value"):
    rows = record[(record.model == model) & (record.suite == suite) & (record.name == name)]
    assert len(rows), (model, suite, name)
    return f"{rows[column].mean():.1f}"


@pytest.fixture(scope="module")
def readouts():
    "The base, and the three kinds of long runs, each by v·t (before) and by the mixture (after), on test"
    found = []
    for name in ("readouts", "long_readouts"):
        rows = read_record(name).query("split == 'test' and score == 'both'")
        found.append(rows.assign(model=rows.model.str.replace(r", seed \d+$", "", regex=True)))
    return found


ROWS = {
    "SugarCrepe, average": ("sugarcrepe", "average"),
    "SugarCrepe, swap object": ("sugarcrepe", "swap_obj"),
    "Phrase binding": ("binding", "phrases"),
    "Winoground, group": ("winoground", "group"),
    "Retrieval, image → text R@1": ("retrieval", "i2t R@1"),
}


def test_the_table_is_that_of_the_records(readouts):
    base, tuned = readouts
    for label, row in ROWS.items():
        wanted = [mean(base, "base", *row, column) for column in ("before", "after")]
        for model in ("plain", LONG):
            wanted += [mean(tuned, model, *row, column) for column in ("before", "after")]
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {label} |")]
        assert [cell.strip(" *") for cell in line.strip("|").split("|")[1:]] == wanted, label


def test_the_best_of_a_row_is_bold():
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
        if "**" in line and line.startswith("|"):
            values = [float(cell.strip("*")) for cell in cells]
            assert [cell for cell in cells if "*" in cell] == [f"**{max(values):.1f}**"], line


def test_numbers_of_sentences():
    "Every decimal of the prose is one of the records', and each of these is there"
    repeat = read_record("repeat")
    wanted = set()
    for model in ("base", "+ npc + xac, α 0.4"):
        wanted |= {mean(repeat, model, *row) for row in (("sugarcrepe", "average"), ("localisation", "AUROC"))}
    prose = "\n".join(line for line in re.sub(r"```.*?```", "", PAGE, flags=re.S).splitlines() if line[:1] != "|")
    found = set(re.findall(r"\d+\.\d+", prose))
    assert found - TYPED == wanted


def test_the_page_is_short():
    assert len(PAGE.split()) <= 1000
