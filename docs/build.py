"""Builds the site: every page and room as it is stored, the chapters' doors, the exercises, the library's reference.

    python docs/build.py [FOLDER [CHAPTER …]]     into FOLDER, by default _site, all chapters or some of them

Nothing is run and nothing is fetched.

Sphinx with MyST-NB builds the pages: it names dead links and anchors, and its search needs no server. The same source
with MkDocs (92 s beside its 66, on a busy machine) names no dead anchor of a notebook and fetches its search index,
Jupyter Book 1 is the same Sphinx in 217 s, and Jupyter Book 2 fetches its theme at each build.

What this file adds is the pages' source: notebooks with links that a page can follow,
a table of contents made from the folders of nbs/, and a reference made from the comments of c2lip's signatures.
"""

import base64
import json
import os
import re
import shutil
import sys
import time
from configparser import ConfigParser
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from exercises import ROOT, read_room, room_file, rows, without_body
from reference import reference_pages

HERE = Path(__file__).resolve().parent
PAGE = HERE / "maps.html"  # that runs two models, of docs/page.py
NBS = ROOT / "nbs"
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "docs/cards.md", "docs/glossary.md")  # pages of the site too
LAUNCHERS = "train evaluate compare explore walkthrough study pretrain".split()


class Site:
    "The source of the site in a folder; `dead` are links that lead nowhere, `links` counts those between notebooks"

    def __init__(self, source: Path, only: tuple[str, ...] = ()):  # `only`: chapters; none: all of them
        self.source, self.dead, self.links = source, [], 0
        self.chapters = [chapter for chapter in chapters() if not only or chapter in only]

    def write(self, place: str, text: str):
        path = self.source / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf8")

    def place_of(self, target: Path) -> str | None:  # a page of the site, or None
        "Where a file of the project is in the site"
        if target.is_relative_to(NBS):
            inner = target.relative_to(NBS).as_posix()
            if target.is_dir():
                return f"{inner}/index.md" if inner in self.chapters else None
            if inner.partition("/")[0] in {*chapters()} - {*self.chapters}:
                return None
            return "readme.ipynb" if inner == "index.ipynb" else inner  # docs/index.md is the first page
        return target.name if target in (HERE / "index.md", *(ROOT / page for page in PAGES)) else None

    def moved(self, text: str, home: Path, door: bool = False) -> str:
        "Markdown of a file in `home`, with links that count from its place in the site"
        here = Path(self.place_of(home / "x.ipynb") or "x").parent
        pattern = r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)"

        def move(match):
            label, link = match.groups()
            if label.startswith("[!"):  # an image that is a link
                label = re.sub(pattern, move, label[1:-1]).join("[]")
            if re.match(r"[a-z]+:|#", link):
                return match.group(0)
            file, mark, anchor = link.partition("#")
            target = Path(os.path.normpath(home / file))
            target = room_file(target) if door else target
            if not target.exists():
                self.dead.append(f"{home.relative_to(ROOT)}: {link}")
                return match.group(0)
            if target == PAGE:  # Sphinx would make a download of it
                return f'<a href="{os.path.relpath(PAGE.name, here)}">{label[1:-1]}</a>'
            place = self.place_of(target)
            if place is None:
                words, path = label.strip("![]"), target.relative_to(ROOT).as_posix()  # a file of the clone, no page
                return f"`{path}`" if words in path else f"{words} (`{path}`)"
            if place.endswith(".ipynb") or place.endswith(".md"):
                self.links += 1
            else:
                (self.source / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, self.source / place)
            return f"{label}({os.path.relpath(place, here)}{mark}{anchor})"

        parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.S)
        return "".join(p if p.startswith("`") else re.sub(pattern, move, p) for p in parts)

    def notebook(self, path: Path):
        "A notebook as a page: without the cells and lines that only nbdev reads"
        room = path.relative_to(NBS).with_suffix("").as_posix()
        page, cells = read_room(room), []
        for cell in page["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.moved(cell["source"], path.parent)
            elif cell["cell_type"] == "code":
                if re.search(r"^#\|\s*(default_exp|hide)|nbdev_export\(\)", cell["source"], re.M):
                    continue
                cell["source"] = re.sub(r"^#\|.*\n?", "", cell["source"], flags=re.M)
                imports = re.findall(r"^(?:import|from) |^    \w+,$|^\)$", cell["source"], re.M)
                if len(imports) > max(4, cell["source"].count("\n") // 2):
                    cell["metadata"] = {"tags": ["hide-input"]}  # folded
            cells.append(cell)
        if room in ("tour", *LAUNCHERS) and (line := colab_line(room, settings()["git_url"])):
            cells.insert(1, {"cell_type": "markdown", "id": "colab", "metadata": {}, "source": line})
        self.write(self.place_of(path), json.dumps(page | {"cells": cells}))

    def door(self, chapter: str):
        "A chapter's page: the door by hand, its rooms, its exercises"
        text = (HERE / "chapters" / f"{chapter}.md").read_text(encoding="utf8")
        rooms = [p.stem for p in sorted((NBS / chapter).glob("[0-9]*.ipynb"))]
        text = self.moved(text, NBS / chapter, door=True)

        def picture(match):
            room, cell, label = match.groups()
            outputs = next(c["outputs"] for c in read_room(room)["cells"] if c["id"] == cell)
            data = next(o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {}))
            (self.source / chapter).mkdir(parents=True, exist_ok=True)
            (self.source / chapter / f"{cell}.png").write_bytes(base64.b64decode("".join(data)))
            return f"[![{label}]({cell}.png)](../{room_file(NBS / f'{room}.ipynb').relative_to(NBS)})"

        text = re.sub(r"<!-- picture (\S+) (\S+) (.*?) -->", picture, text)
        text = text.replace("<!-- rooms -->", toctree(rooms))
        exercises = [row for row in rows() if row["room"].startswith(f"{chapter}/")]
        self.write(f"{chapter}/index.md", text.replace("<!-- exercises -->", exercises_text(exercises)))


def settings():
    "settings.ini"
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf8")
    return parser["DEFAULT"]


def colab_line(
    room: str,  # such as train
    address: str,  # git_url, of a repository at GitHub
) -> str:  # empty where there is no address
    "A link that opens a launcher in Colab, and the line that installs the workbook there"
    if not address:
        return ""
    repository = address.rstrip("/").removesuffix(".git")
    there = repository.replace("https://github.com/", "https://colab.research.google.com/github/")
    install = f"%pip install -q 'c2lip[lab] @ git+{repository}'"
    return f"[Open in Colab]({there}/blob/main/nbs/{room}.ipynb), and run `{install}` there first."


def chapters() -> list[str]:
    "The chapters, folders of nbs/ with a door"
    return [p.stem for p in sorted((HERE / "chapters").glob("*.md")) if (NBS / p.stem).is_dir()]


def toctree(places: list[str], options: str = "") -> str:
    "A table of contents"
    return "\n".join(["```{toctree}", options or ":maxdepth: 1", "", *places, "```"])


def exercises_text(exercises: list[dict]) -> str:
    "The exercises of a chapter, with hint and solution folded"
    parts = ["`make exercises` writes them as notebooks without the solutions, `make solved` says which pass.\n"]
    for number, row in enumerate(exercises, 1):
        cells = {cell["id"]: cell["source"] for cell in read_room(row["room"])["cells"]}
        _, body = without_body(cells[row["cell"]], row["function"])
        room = room_file(NBS / f"{row['room']}.ipynb").stem
        parts += [
            f"**{number}. `{row['function']}`**, in [{room}]({room}.ipynb). {row['question']}\n",
            f"<details><summary>Hint</summary>\n\n{row['hint']}\n\n</details>\n",
            f"<details><summary>Solution</summary>\n\n```python\n{body}\n```\n\n</details>\n",
        ]
    return "\n".join(parts)


def write_source(source: Path, only: tuple[str, ...] = ()) -> Site:
    "Everything that Sphinx reads"
    site = Site(source, only)
    shutil.copy(HERE / "conf.py", source)
    shutil.copytree(HERE / "static", source / "static")
    launchers = {p.stem: p for p in NBS.glob("[a-z]*.ipynb")}
    for path in [*launchers.values(), *(p for c in site.chapters for p in sorted((NBS / c).glob("[0-9]*.ipynb")))]:
        site.notebook(path)
    for chapter in site.chapters:
        site.door(chapter)
    for page in PAGES:
        path = ROOT / page
        site.write(path.name, site.moved(path.read_text(encoding="utf8"), path.parent))
    for place, text in reference_pages(ROOT / "c2lip", site.chapters).items():
        site.write(place, text)
    pages = [name for name in LAUNCHERS if name in launchers]
    pages += sorted(set(launchers) - {*LAUNCHERS, "index", "tour"})
    contents = [
        toctree(["readme", "tour"], ":hidden:\n:caption: Start"),
        toctree([f"{chapter}/index" for chapter in site.chapters], ":hidden:\n:caption: Chapters"),
        toctree(pages, ":hidden:\n:caption: Launchers and study"),
        toctree(["glossary", "reference/index", "cards", "CONTRIBUTING", "CHANGELOG"], ":hidden:\n:caption: Reference"),
    ]
    first = site.moved((HERE / "index.md").read_text(encoding="utf8"), HERE)
    site.write("index.md", "\n\n".join([first, *contents]))
    return site


def dead_links(home: Path) -> list[str]:
    "Links and anchors of built pages that lead nowhere, and files that a page would take from another host"
    texts = {page: page.read_text(encoding="utf8") for page in home.rglob("*.html")}
    names = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    dead = []
    for page, text in texts.items():
        dead += [
            f"{page.name}: {link}"
            for link in re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="(https?:[^"]+)', text)
        ]
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text):
            to = urlsplit(unescape(link))
            target = Path(os.path.normpath(page.parent / unquote(to.path))) if to.path else page
            if to.scheme:
                continue
            if not target.exists() or to.fragment and unquote(to.fragment) not in names.get(target, ()):
                dead.append(f"{page.relative_to(home)}: {link}")
    return dead


def main(folder: str = "_site", *only: str):
    "Build the site; a dead link or a warning of Sphinx ends with exit code 1"
    from sphinx.cmd.build import build_main  # of the site's own environment

    begun, place = time.time(), ROOT / folder
    shutil.rmtree(place, ignore_errors=True)
    source = place / "source"
    source.mkdir(parents=True)
    site = write_source(source, only)
    if site.dead:
        raise SystemExit("dead links:\n" + "\n".join(site.dead))
    failed = build_main(["-q", "-W", "--keep-going", "-b", "html", str(source), str(place / "html")])
    shutil.rmtree(place / "html" / ".doctrees", ignore_errors=True)
    if failed:
        raise SystemExit(failed)
    shutil.copy(PAGE, place / "html")
    if dead := dead_links(place / "html"):
        raise SystemExit("dead links:\n" + "\n".join(dead))
    pages = len([*(place / "html").rglob("*.html")])
    print(f"{pages} pages, {site.links} links between notebooks, {time.time() - begun:.0f} s: {folder}/html/index.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
