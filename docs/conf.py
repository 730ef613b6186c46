"""Sphinx reads this: what the site is made of. `make site` calls build.py, which calls Sphinx."""

from docutils import nodes
from latex2mathml.converter import convert

project, author, copyright = "c2lip", "the c2lip developers", "2026 onwards, the c2lip developers"
extensions = ["myst_nb"]
nb_execution_mode = "off"  # pages show stored outputs; nothing is run
nb_merge_streams = True
nb_code_prompt_show = nb_code_prompt_hide = "imports"  # what build.py folds
nb_render_markdown_format = "myst"  # which has tables
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type", "mystnb.mime_priority"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "c2lip"
html_static_path = ["static"]
html_css_files = ["c2lip.css"]
html_show_search_summary = False  # summaries are fetched, which a page that is opened from a disk cannot do
html_copy_source = False
html_use_index = False  # no page has entries for one
html_theme_options = {"top_of_page_buttons": [], "navigation_with_keys": True}


def formula(self, node):
    "A formula as MathML: it needs no script, no font and no network"
    display = "block" if node.tagname == "math_block" else "inline"
    text = convert(node.astext(), display=display)
    self.body.append(f'<div class="c2lip-formula">{text}</div>' if display == "block" else text)
    raise nodes.SkipNode


def folded(app, page, template, context, doctree):
    "On the left the pages of one chapter: with those of all on every page the build takes half as long again"
    toctree = context["toctree"]
    context["toctree"] = lambda **how: toctree(**how | {"collapse": True})


def setup(app):
    app.connect("html-page-context", folded, priority=400)  # before the theme
    app.add_html_math_renderer("mathml", inline_renderers=(formula, None), block_renderers=(formula, None))
    app.config.html_math_renderer = "mathml"
