"""Do pages store what their cells show?"""

import os
import re
import warnings
from functools import partial

from conftest import ROOT

from c2lip.core.files import read_json
from c2lip.lab.dev.upkeep import _page_outputs, _plain_text

FEW = "parts|blind|95 %|again|change"
"In heads that a small run has not, for want of items, or has for a second model"


def outputs(page, small):
    "Cell → what it shows, an image by its kind, no line of speed or of a cache; of a small run the heads of the tables"
    shown = {}
    for cell in read_json(page)["cells"]:
        texts = []
        for output in _page_outputs(cell.get("outputs", ()), partial(_plain_text, root=ROOT)):
            kind, text = next(iter(output.get("data", {"text": output.get("text")}).items()))
            texts.append(kind if kind == "image/png" else re.sub(r".*(/s |data/cache/).*\n?", "", "".join(text)))
        if small:
            heads = re.findall("<th.*?>(.*?)</th>", "".join(texts), re.S)
            texts = {head for head in heads if not re.search(FEW, head)}
        shown[cell["id"]] = texts
    return shown


def assert_fresh(made, page, small=False):
    "A page stores what it showed when it was run now; a contributor is warned"
    now, stored = outputs(made, small), outputs(page, small)
    stale = [cell for cell, texts in stored.items() if texts and texts != now[cell]]
    if stale:
        warnings.warn(f'{page.stem} shows something else now, cells {stale}: make outputs ARGS="…"', stacklevel=2)
    assert not (stale and os.environ.get("C2LIP_WALLS") == "1"), (page, stale)
