"""The exercises: rooms with a body taken out, made from data/exercises.yaml, and a check that says which pass.

    python docs/exercises.py make FOLDER      writes a notebook a room; one that is there is left as it is
    python docs/exercises.py check FOLDER     runs them, and says which exercises pass

An exercise is a row: the room, the function whose body is taken out, the cell whose assertions check it, a question
and a hint. The cell that is emptied is the last above the check that defines the function. The solution is the room's own body.
"""

import ast
import codeop
import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
EMPTY = "...  # your code"
BEGIN = f"""> Below each *Exercise* a function has lost its body. Type yours in place of `{EMPTY}` and run the cells
> down to the check. Hint and solution open when you click them. `make solved` in a terminal says what passes."""


def rows() -> list[dict]:  # one exercise each, numbered within its room
    "The exercises of data/exercises.yaml, in the order of the rooms, each with the cell that defines its function"
    chapters = yaml.safe_load((ROOT / "data" / "exercises.yaml").read_text(encoding="utf8"))
    exercises = []
    for room, written in sorted(chapters.items()):
        cells = read_room(room)["cells"]
        for row in written:
            exercises.append({"room": room, "cell": defining_cell(cells, row["function"], row["check"]), **row})
    return exercises


def defining_cell(cells: list[dict], function: str, check: str) -> str:  # of a room; a function, or a method as Class.method
    "The id of the last cell before the check that defines a function: a naive version may stand above it"
    definition = re.compile(rf"^(def|class) {function.partition('.')[0]}\b", re.M)
    last = None
    for cell in cells:
        if cell["id"] == check:
            break
        if cell["cell_type"] == "code" and definition.search(cell["source"]):
            last = cell["id"]
    if last is None:
        raise SystemExit(f"data/exercises.yaml: no cell above {check} defines {function}")
    return last


def room_file(file: Path) -> Path:  # of a room; one that got another number is found by its name
    "The file of a room"
    moved = sorted(file.parent.glob(f"[0-9]*_{file.name.partition('_')[2]}")) if file.name[:1].isdigit() else []
    return file if file.exists() or not moved else moved[0]


def read_room(room: str) -> dict:  # `room`: its path below nbs/, without the ending
    "A room, as its JSON holds it, every source as one text"
    notebook = json.loads(room_file(ROOT / "nbs" / f"{room}.ipynb").read_text(encoding="utf8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def _definition(code, function):
    "The syntax node of a function, or of a method as Class.method"
    body = ast.parse(code).body
    for name in function.split("."):
        body = [node for node in body if getattr(node, "name", None) == name]
        if len(body) != 1:
            raise SystemExit(f"data/exercises.yaml: the cell defines {len(body)} of {function}")
        node, body = body[0], body[0].body
    return node


def without_body(code: str, function: str) -> tuple[str, str]:  # the cell with an empty body, and the body
    "Take the body of a function out of a cell; signature, comments of parameters and docstring stay"
    node, lines = _definition(code, function), code.split("\n")
    first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
    above = node.body[0].end_lineno if first is not node.body[0] else first.lineno - 1
    body, indent = lines[above : node.end_lineno], " " * first.col_offset
    return "\n".join(lines[:above] + [indent + EMPTY] + lines[node.end_lineno :]), "\n".join(body)


def is_run(cell: dict) -> bool:
    "Whether the check runs a cell: code that nbdev_test would run, and that is not the export at the end"
    skipped = re.search(r"^#\|\s*(eval: false|slow|cuda|weights)|nbdev_export\(\)", cell["source"], re.M)
    return cell["cell_type"] == "code" and not skipped


def run_cell(code: str, names: dict):
    "Run a cell of python in `names`; what it prints is thrown away"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exec(names["compile"](re.sub(r"^[%!].*$", "", code, flags=re.M), "<cell>", "exec"), names)


@contextlib.contextmanager
def place_of(room: str):
    "The folder that a room runs in, and figures that open no window"
    import matplotlib.pyplot as plt

    before = Path.cwd()
    os.chdir((ROOT / "nbs" / room).parent)
    plt.switch_backend("agg")
    try:
        compiled = codeop.Compile()  # which remembers what a cell imports from __future__
        yield {"__name__": "__main__", "display": lambda *shown: None, "compile": compiled}
    finally:
        plt.close("all")
        os.chdir(before)


# ---- the student's folder


def _markdown(name, text):
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def exercise_notebook(room: str, exercises: list[dict]) -> dict:
    "A room up to the last check of its exercises, without their bodies; the solution is folded under each check"
    page, cells, left = read_room(room), [_markdown("begin", BEGIN)], {row["check"] for row in exercises}
    for cell in page["cells"]:
        if not left:
            break
        if re.search(r"^#\|\s*(default_exp|hide)|nbdev_export\(\)", cell["source"], re.M):
            continue
        cell = dict(cell, outputs=[], execution_count=None) if cell["cell_type"] == "code" else cell
        solutions = []
        for row in (row for row in exercises if row["cell"] == cell["id"]):
            text = f"### Exercise: `{row['function']}`\n\n{row['question']}\n\n"
            text += f"<details><summary>Hint</summary>\n\n{row['hint']}\n\n</details>"
            cells.append(_markdown(f"ask-{row['function'].replace('.', '-')}", text))
            cell["source"], body = without_body(cell["source"], row["function"])
            solutions.append((row["function"], body))
        cell["source"] = re.sub(r"^#\|\s*export.*\n", "", cell["source"], flags=re.M)
        if cell["id"] in left:
            names = ", ".join(row["function"] for row in exercises if row["check"] == cell["id"])
            cell["source"] = f"# the check of {names}\n{cell['source']}"
            left.discard(cell["id"])
        cells.append(cell)
        for function, body in solutions:
            text = f"<details><summary>Solution of <code>{function}</code></summary>\n\n"
            text += f"```python\n{body}\n```\n\n</details>"
            cells.append(_markdown(f"see-{function.replace('.', '-')}", text))
    if left:
        raise SystemExit(f"data/exercises.yaml: {room} has no cell {', '.join(sorted(left))}")
    return page | {"cells": cells}


def by_room() -> dict[str, list[dict]]:
    "The exercises of each room"
    rooms: dict[str, list[dict]] = {}
    for row in rows():
        rooms.setdefault(row["room"], []).append(row)
    return rooms


def make(folder: Path):
    "Write the exercises as notebooks; a student's own work is never written over"
    for room, exercises in by_room().items():
        file = folder / f"{room}.ipynb"
        if file.exists():
            print(f"{file} is there and stays as it is")
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        notebook = exercise_notebook(room, exercises)
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    print(f"{len(rows())} exercises in {folder}; make solved says which pass")


def failure(code: str, names: dict) -> str:
    "What a cell raises, in one line; empty where it passes"
    try:
        run_cell(code, names)
        return ""
    except Exception as e:
        return f"{type(e).__name__}: {' '.join(str(e).split())[:100]}"


def answers(notebook: dict) -> dict[str, str]:  # cell → source
    "What a student wrote"
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}


def check_room(room: str, exercises: list[dict], written: dict[str, str]):  # yields (row, what is wrong)
    """Run a room as it is and, in its place, what was written for an exercise; then the exercise's check.
    One exercise is checked at a time, the others by the room's own bodies: a mistake in one fails no other."""
    cells = [cell for cell in read_room(room)["cells"] if is_run(cell)]
    sources = {cell["id"]: cell["source"] for cell in cells}
    last = max(i for i, cell in enumerate(cells) if cell["id"] in {row["check"] for row in exercises})
    with place_of(room) as names:
        for cell in cells[: last + 1]:
            run_cell(cell["source"], names)
            own_names = dict(names)
            for row in (row for row in exercises if row["check"] == cell["id"]):
                answer = with_answer(sources[row["cell"]], written.get(row["cell"], ""), row["function"])
                wrong = answer if answer.startswith("!") else failure(answer, names) or failure(cell["source"], names)
                names.clear()
                names.update(own_names)
                yield row, wrong.lstrip("!")


def with_answer(code: str, written: str, function: str) -> str:  # "!…" where nothing can be run
    "A room's cell in which one function is the student's"
    try:
        theirs = _definition(written, function)
    except (SyntaxError, SystemExit) as e:
        return f"!{type(e).__name__}: the cell does not define {function}"
    node, lines = _definition(code, function), code.split("\n")
    body = written.split("\n")[theirs.lineno - 1 : theirs.end_lineno]
    return "\n".join(lines[: node.lineno - 1] + body + lines[node.end_lineno :])


def is_empty(written: str, function: str) -> bool:
    "Whether nothing was written in place of a function's body"
    try:
        node = _definition(written, function)
    except (SyntaxError, SystemExit):
        return False
    body = node.body[ast.get_docstring(node) is not None :]
    return [ast.unparse(statement) for statement in body] == ["..."]


def check(folder: Path):
    "Say which exercises pass; exit code 1 where one does not"
    passed = 0
    for room, exercises in by_room().items():
        file = folder / f"{room}.ipynb"
        if not file.exists():
            raise SystemExit(f"{file} is not there; make exercises writes it")
        written = answers(json.loads(file.read_text(encoding="utf8")))
        tried = [row for row in exercises if not is_empty(written.get(row["cell"], ""), row["function"])]
        mistakes = {row["function"]: wrong for row, wrong in check_room(room, tried, written)} if tried else {}
        for row in exercises:
            wrong = mistakes.get(row["function"], "empty")
            passed += not wrong
            print(f"{'passes ' if not wrong else 'not yet'}  {room}  {row['function']}  {wrong}".rstrip(), flush=True)
    print(f"{passed} of {len(rows())} pass" + ("; all tests passed" if passed == len(rows()) else ""))
    raise SystemExit(passed < len(rows()))


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](Path(sys.argv[2]).resolve())
