"""An index of images: killed, changed, damaged, and searched in two steps as in one."""

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np

from c2lip.lab.dev.command import main
from c2lip.lab.serve.search import ImageIndex, index_images
from c2lip.lab.world.captions import numbered_scene
from c2lip.lab.world.scenes import save_scene

MISTAKES = {
    "index nowhere": "cannot be read: No such file",
    "index images --model base": "by other weights: choose another place",
    "index .": "an index of another folder",
    "search mug --index images": "images cannot be searched (there is no file",
    "search \t": "the search is empty",
    "search \u200b": "the search is empty",
    "index  --out new": "named by an empty text",
    "index images --vectors -1": "must be a whole number from 0 to 1000",
    "search mug -n 0": "must be a whole number from 1 to 1000",
    "search mug --html page.png": "a file that ends in .html, not to",
    "search mug --html nowhere/page.html": "cannot be written (No such file",
    "search <b></b>": "the search is empty",
    "search mug --index twice": "twice cannot be searched (",
    "index pointers --out new": "image that git lfs pull fetches",
    "rehearse --gpu ": "gpu is one of A40",
}


def hits(place):
    return ImageIndex(place).search("a red mug and a blue fish", 20).sort_values("file", ignore_index=True).round(5)


def draw(images, numbers):
    for number in numbers:
        save_scene(numbered_scene("test", number), images / f"{number:02d} <é>.png")


def test_an_index_goes_on_and_follows_its_folder(tmp_path, run):
    "Killed in the middle of a block it keeps the blocks before; after changes it finds what a new index finds"
    images = tmp_path / "images"
    draw(images, range(20))
    code = """
import os, c2lip.lab.serve.search as search
save, calls = search.np.save, []
def half(file, rows):
    calls.append(save(file, rows))
    if len(calls) == 3:
        file.truncate(200)
        os.kill(os.getpid(), 9)
search.np.save = half
search.index_images("images", os.path.abspath("index"), block=4)
"""
    assert run(sys.executable, "-c", code, cwd=tmp_path).returncode == -9
    assert index_images(images, tmp_path / "index").startswith("12 images tried")

    changed, broken, gone, *_ = sorted(images.iterdir())
    save_scene(numbered_scene("validation", 1), changed)
    broken.write_text("no image")
    gone.unlink()
    draw(images, [30])
    assert "1 broken image" in index_images(images, tmp_path / "index")
    index_images(images, tmp_path / "fresh")
    assert hits(tmp_path / "index").equals(hits(tmp_path / "fresh"))


def test_the_commands(tmp_path, monkeypatch, capsys):
    "A table of 80 columns, a page that needs no other file; a mistake is one line"
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "images", range(12))
    os.rename("images/11 <é>.png", os.fsdecode(b"images/\xff.png"))
    assert main(["index", "images"]) == main(["search", "a red mug and a blue fish"]) == 0

    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown[1:12])) <= 80
    assert "by phrases, of 12 images in" in shown[-1]
    assert (
        main(["index", "images", "--vectors", "0", "--out", "small"])
        == main(["search", "mug", "--index", "small"])
        == 0
    )
    assert "by vector, of 12 images in" in capsys.readouterr().out.splitlines()[-1]
    assert main(["search", "a <red> mug\ud83d", "--html", "page.html", "-n", "12"]) == 0

    page = (tmp_path / "page.html").read_text()
    assert set(re.findall('src="(.{22})', page)) == {"data:image/png;base64,"}
    assert "http" not in page
    assert page.count("&lt;é&gt;.png") >= 22 and "\\udcff.png" in page
    assert not re.search("<é|<red", page)

    shutil.copytree("small", "twice")
    for block in Path("twice").glob("*.npy"):
        np.save(block, np.repeat(np.load(block), 2))
    Path("pointers").mkdir()
    Path("pointers/a.png").write_text("version https://git-lfs.github.com/spec/v1")
    for words, message in MISTAKES.items():
        assert main(words.split(" ")) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    for image in (tmp_path / "images").iterdir():
        image.unlink()
    assert main(["search", "mug", "--html", "gone.html"]) == 2
    assert "images any more: index the folder where they are" in capsys.readouterr().err
