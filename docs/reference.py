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


def _escape(text, code, signs):
    "Text with `code` spans done by one function, and signs of Markdown outside of them escaped"
    return re.sub(rf"(`[^`]*`)|([{signs}])", lambda m: code(m[1]) if m[1] else "\\" + m[2], text)


def _cell(text):
    "Text for a cell of a table"
    return _escape(text.replace("<", "&lt;"), lambda span: span.replace("|", "\\|").replace("&lt;", "<"), "|*_$")


def _code(text):
    "Code for a cell of a table"
    return f"`` {text} ``".replace("|", "\\|") if text else ""


def _typed(annotation, meaning):
    "Cells of a type and a meaning; both may be in an `Annotated`"
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        first, *more = annotation.slice.elts
        words = [x.value for x in more if isinstance(x, ast.Constant)]
        kinds = [first, *(x for x in more if not isinstance(x, ast.Constant))]
        return " ".join(_code(ast.unparse(x)) for x in kinds), _cell(meaning or "; ".join(words))
    return _code(ast.unparse(annotation)) if annotation else "", _cell(meaning)


def _parameters(node):
    "The parameters of a function: node, name, default"
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    parameters = [(a, a.arg, d) for a, d in zip(plain, defaults)]
    parameters += [(args.vararg, f"*{args.vararg.arg}", None)] if args.vararg else []
    parameters += [(a, a.arg, d) for a, d in zip(args.kwonlyargs, args.kw_defaults)]
    parameters += [(args.kwarg, f"**{args.kwarg.arg}", None)] if args.kwarg else []
    return [row for row in parameters if row[1] not in ("self", "cls")]


def _docstring(node):
    text = (ast.get_docstring(node) or "").replace("<", "&lt;")
    return _escape(text, lambda span: span.replace("&lt;", "<"), "*_$")


def _title(name):
    "A dotted name that a narrow page breaks after a dot"
    return name.replace("_", "\\_").replace(".", ".\u200b")  # a space of no width


def _function(node, comments, level, owner=""):
    "The text of a function; a comment that several parameters share stays below the signature, as in the source"
    parameters = _parameters(node)
    names = [(f"{name}={ast.unparse(d)}" if d is not None else name) for _, name, d in parameters]
    ends = [x.end_lineno for x in [node.returns, *(a for a, _, _ in parameters)] if x]
    shared = [f"# {comments[line]}" for line in sorted(set(ends)) if ends.count(line) > 1 and line in comments]
    code = "\n".join([f"{owner}{node.name}({', '.join(names)})", *shared])
    lines = [f"{level} {_cell(owner + node.name)}\n", f"```python\n{code}\n```\n", _docstring(node) + "\n"]
    named = [(_code(name), a.annotation, a.end_lineno) for a, name, _ in parameters]
    if node.returns and ast.unparse(node.returns) != "None":
        named.append(("returns", node.returns, node.returns.end_lineno))
    notes = {line: text for line, text in comments.items() if ends.count(line) == 1}
    table = [(name, *_typed(kind, notes.get(line, ""))) for name, kind, line in named]
    if any(kind or meaning for _, kind, meaning in table):
        width = 3 if any(meaning for _, _, meaning in table) else 2
        rows = [("parameter", "type", "meaning"), ("---",) * 3, *table]
        lines += ["| " + " | ".join(row[:width]) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _class(node, comments):
    "The text of a class: docstring, fields, public methods"
    lines = [f"## {node.name}\n", _docstring(node) + "\n"]
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")]
    if fields:
        lines += ["| field | type | meaning |", "|---|---|---|"]
        for n in fields:
            about = [x.value for x in n.value.args[1:2]] if isinstance(n.value, ast.Call) else []  # of a control
            kind, meaning = _typed(n.annotation, comments.get(n.end_lineno, "") or "".join(map(str, about)))
            lines.append(f"| {_code(n.target.id)} | {kind} | {meaning} |")
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
        head = f"# {_title(module)}\n\n{_docstring(tree)}\n\n"
        head += f"Made in [{room.replace('_', chr(92) + '_')}](../{room}.ipynb).\n\n" if room else ""
        parts = [_class(n, comments) if isinstance(n, ast.ClassDef) else _function(n, comments, "##") for n in defined]
        pages[f"reference/{module}.md"] = head + "\n".join(parts)
        names.append(module)
    contents = "# The library\n\nEvery public function and class, with the meaning of its parameters.\n\n"
    pages["reference/index.md"] = contents + "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"
    return pages
