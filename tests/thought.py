"""How much a maintainer owns, and how much thought stands in a line of it: what the gates count.

`python tests/thought.py` prints each size, its wall and what is free.
"""

import ast
import io
import json
import os
import re
import sys
import tokenize
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
CONTEXTS = (ast.Load, ast.Store, ast.Del)
INNER = {"body", "orelse", "finalbody", "handlers", "decorator_list", "cases"}  # fields that hold statements


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_counted(node):
    "Statements but for definitions, imports and docstrings"
    left_out = (ast.Import, ast.ImportFrom, *DEFINITIONS)
    return isinstance(node, ast.stmt) and not isinstance(node, left_out) and not is_docstring(node)


def nodes_of(statement):
    "Nodes of a statement's own expressions, without the statements inside it"
    fields = [value for name, value in ast.iter_fields(statement) if name not in INNER]
    parts = [part for value in fields for part in (value if isinstance(value, list) else [value])]
    trees = [part for part in parts if isinstance(part, ast.AST)]
    return sum(not isinstance(node, CONTEXTS) for tree in trees for node in ast.walk(tree))


def is_packed(node):
    "a, b = x, y"
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def lines_of_body(function):
    "The numbers of the first and the last line of a function without its docstring; None where nothing is left"
    body = [statement for statement in function.body if not is_docstring(statement)]
    return (body[0].lineno, function.end_lineno) if body else None


@cache
def measure(text: str) -> Counter:
    "The counts of one module"
    count = Counter()
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}

    for node in ast.walk(ast.parse(text)):
        if is_counted(node):
            count["statements"] += 1
            count["nodes"] += nodes_of(node)
            count["packed"] += is_packed(node)

        if not isinstance(node, FUNCTIONS):
            continue

        place = lines_of_body(node)
        if place and place[1] - place[0] >= 11:
            count["long bodies"] += 1
            count["airless"] += all(line.strip() for line in lines[place[0] - 1 : place[1]])

        if not node.name.startswith("_"):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments = [a for a in arguments if a.arg not in ("self", "cls")]
            alone = {a.lineno for a in arguments} - {node.lineno}
            count["parameters"] += len(arguments)
            count["commented"] += sum(a.lineno in alone & commented for a in arguments)

    return count


def python_files(folder: Path) -> list[Path]:
    "Those that people write"
    return [file for file in sorted(folder.rglob("*.py")) if file.name != "_modidx.py"]


def nodes_in(folder: Path) -> int:
    "The nodes of all modules below a folder"
    return sum(measure(file.read_text(encoding="utf8"))["nodes"] for file in python_files(folder))


def nodes_of_cell(code: str) -> int:
    "The nodes of a cell, without its magics and lines of shell"
    lines = ["" if re.match(r"\s*[%!]", line) else line for line in code.splitlines()]
    return sum(nodes_of(node) for node in ast.walk(ast.parse("\n".join(lines))) if is_counted(node))


def words_of(path: Path) -> int:
    "The words of a notebook's Markdown, as `wc -w` counts them, bars of tables and all"
    cells = json.loads(path.read_text(encoding="utf8"))["cells"]
    return sum(len("".join(cell["source"]).split()) for cell in cells if cell["cell_type"] == "markdown")


def nodes_of_examples(path: Path) -> int:
    "The nodes of a notebook's cells that are not exported"
    cells = json.loads(path.read_text(encoding="utf8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return sum(nodes_of_cell(code) for code in codes if not re.search(r"^#\|\s*export", code, re.M))


def owned(root: Path) -> dict[str, int]:
    "All that is kept up by hand: nodes of library, tests, cells and docs; words of notebooks and README"
    notebooks = [path for path in sorted((root / "nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in path.parts]
    cells = {path: nodes_of_examples(path) for path in notebooks}
    library = nodes_in(root / "c2lip")
    counts = {
        "library": library,
        "heart": library - nodes_in(root / "c2lip" / "lab"),
        "tests": nodes_in(root / "tests"),
        "cells": sum(cells.values()),
        "cells of study pages": sum(nodes for path, nodes in cells.items() if "study" in path.parent.name),
        "docs": nodes_in(root / "docs"),
        "words of notebooks": sum(map(words_of, notebooks)),
        "words of README.md": len((root / "README.md").read_text(encoding="utf8").split()),
        "words of study.ipynb": words_of(root / "nbs" / "study.ipynb"),
    }
    return {"all nodes": sum(counts[part] for part in ("library", "tests", "cells", "docs"))} | counts


WALLS = {
    "all nodes": 218_000,
    "heart": 23_000,
    "cells of study pages": 11_000,
    "words of notebooks": 43_000,
    "words of README.md": 900,
    "words of study.ipynb": 2_000,
}


def beyond(sizes: dict[str, float], walls: dict[str, float]) -> list[str]:
    "Print size, wall and what is free; warn from 95 % on; the lines of what is beyond its wall"
    over = []
    for what, wall in walls.items():
        size = round(sizes[what], 2)
        line = f"{what}: {size:,} of {wall:,}, {round(wall - size, 2):,} free"
        print(line)
        if size > 0.95 * wall:
            warnings.warn(line, stacklevel=2)
        if size > wall:
            over.append(line)
    return over


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # each line is printed
    sizes = owned(Path(__file__).resolve().parent.parent)
    over = beyond(sizes, WALLS)
    for what in sizes.keys() - WALLS.keys():
        print(f"{what}: {sizes[what]:,}")
    sys.exit(bool(over) and os.environ.get("C2LIP_WALLS") == "1")
