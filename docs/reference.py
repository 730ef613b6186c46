"""The reference of the library, made from its signatures: a page a module, comments of parameters as a table."""

import ast
import io
import re
import tokenize
from pathlib import Path


def _comments(code):
    "Line number → the comment that ends it"
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokens if t.type == tokenize.COMMENT}


def _cell(text):
    "Text for a cell of a table"
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("$", "\\$")


def _code(text):
    "Code for a cell of a table"
    return f"`` {text} ``".replace("|", "\\|") if text else ""


def _parameters(node):
    "The parameters of a function: node, name, default"
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    found = [(a, a.arg, d) for a, d in zip(plain, defaults)]
    found += [(args.vararg, f"*{args.vararg.arg}", None)] if args.vararg else []
    found += [(a, a.arg, d) for a, d in zip(args.kwonlyargs, args.kw_defaults)]
    found += [(args.kwarg, f"**{args.kwarg.arg}", None)] if args.kwarg else []
    return [row for row in found if row[1] not in ("self", "cls")]


def _docstring(node):
    text = (ast.get_docstring(node) or "").replace("<", "&lt;")
    return re.sub(r"([*_$])", r"\\\1", text)


def _function(node, comments, level, owner=""):
    "The text of a function"
    names = [(f"{name}={ast.unparse(d)}" if d is not None else name) for _, name, d in _parameters(node)]
    lines = [f"{level} {(owner + node.name).replace('_', chr(92) + '_')}\n"]
    lines += [f"```python\n{owner}{node.name}({', '.join(names)})\n```\n", _docstring(node) + "\n"]
    table = []
    for a, name, _ in _parameters(node):
        kind = ast.unparse(a.annotation) if a.annotation else ""
        table.append((_code(name), _code(kind), _cell(comments.get(a.end_lineno, ""))))
    close = max([node.lineno, *(x.end_lineno for x in [node.returns, *(a for a, _, _ in _parameters(node))] if x)])
    meaning = comments.get(node.returns.end_lineno, "") if node.returns else ""
    if node.returns and ast.unparse(node.returns) != "None":
        shared = any(a.end_lineno == node.returns.end_lineno for a, _, _ in _parameters(node))
        table.append(("returns", _code(ast.unparse(node.returns)), "" if shared and close else _cell(meaning)))
    if table:
        lines += ["| parameter | type | meaning |", "|---|---|---|", *("| " + " | ".join(row) + " |" for row in table)]
    return "\n".join(lines) + "\n"


def _class(node, comments):
    "The text of a class: docstring, fields, public methods"
    lines = [f"## {node.name}\n", _docstring(node) + "\n"]
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")]
    if fields:
        lines += ["| field | type | meaning |", "|---|---|---|"]
        for n in fields:
            meaning = _cell(comments.get(n.end_lineno, ""))
            lines.append(f"| {_code(n.target.id)} | {_code(ast.unparse(n.annotation))} | {meaning} |")
        lines.append("")
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and (n.name[0] != "_" or n.name == "__init__")]
    for n in methods:
        if n.name == "__init__" and len(_parameters(n)) == 0:
            continue
        lines.append(_function(n, comments, "###", f"{node.name}."))
    return "\n".join(lines) + "\n"


def reference_pages(package: Path, chapters: list[str]) -> dict[str, str]:  # place in the site → markdown
    "A page for each module of the chapters that has public names, and a table of contents"
    pages, names = {}, []
    for file in sorted(package.rglob("*.py")):
        code = file.read_text(encoding="utf8")
        if file.name == "_modidx.py" or not code.strip():
            continue
        tree, comments = ast.parse(code), _comments(code)
        defined = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"]
        if not defined:
            continue
        module = ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        source = next((line for line in code.splitlines() if "File to edit:" in line), "")
        room = source.partition("nbs/")[2].rstrip(". ").removesuffix(".ipynb")
        if room and room.partition("/")[0] not in chapters:
            continue
        head = f"# {module.replace('_', chr(92) + '_')}\n\n{_docstring(tree)}\n\n"
        head += f"Made in [{room.replace('_', chr(92) + '_')}](../{room}.ipynb).\n\n" if room else ""
        parts = [_class(n, comments) if isinstance(n, ast.ClassDef) else _function(n, comments, "##") for n in defined]
        pages[f"reference/{module}.md"] = head + "\n".join(parts)
        names.append(module)
    contents = "# The library\n\nEvery public function and class, with the meaning of its parameters.\n\n"
    pages["reference/index.md"] = contents + "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"
    return pages
