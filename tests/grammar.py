"""The grammar of captions and the reader of treebanks, which are plain code of nbs/dev/03_pipeline.ipynb."""

import json
from pathlib import Path
from types import SimpleNamespace

NOTEBOOK = Path(__file__).resolve().parent.parent / "nbs" / "dev" / "03_pipeline.ipynb"


def _defined():
    names = {"__name__": "grammar"}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf8"))["cells"]:
        if (code := "".join(cell["source"])).startswith("# grammar"):
            exec(compile(code, str(NOTEBOOK), "exec"), names)
    return SimpleNamespace(**names)


_notebook = _defined()
read_conllu, to_doc, sentence_text = _notebook.read_conllu, _notebook.to_doc, _notebook.sentence_text
read_grammar, template_caption = _notebook.read_grammar, _notebook.template_caption
