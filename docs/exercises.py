"""The exercises: rooms with a body taken out, made from data/exercises.yaml, and a check that says which pass.

    python docs/exercises.py make FOLDER      writes a notebook a room; one that is there is left as it is
    python docs/exercises.py check FOLDER     runs them, and says which exercises pass

An exercise is a row: the room, the function whose body is taken out, the cell that holds it, the cell whose assertions
check it, a question and a hint. The solution is the room's own body; nothing is written twice.
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


def rows() -> list[dict]:  # one exercise each, numbered within its room
    "The exercises of data/exercises.yaml, in the order of the rooms"
    found = yaml.safe_load((ROOT / "data" / "exercises.yaml").read_text(encoding="utf8"))
    return [{"room": room, **row} for room, exercises in sorted(found.items()) for row in exercises]


def read_room(room: str) -> dict:  # `room`: its path below nbs/, without the ending
    "A room, as its JSON holds it, every source as one text"
    notebook = json.loads((ROOT / "nbs" / f"{room}.ipynb").read_text(encoding="utf8"))
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
