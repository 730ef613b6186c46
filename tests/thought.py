"""How much thought stands in a line of Python: what the gates count over the syntax trees."""

import ast
import io
import tokenize
from collections import Counter

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
