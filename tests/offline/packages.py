"""What the tests' processes without the library are forked with (forks.py); papermill would import a part of it."""

import gc
from importlib import import_module

MODULES = """open_clip transformers.models.siglip transformers.models.clip spacy.lang.en nbdev.test pytest scipy.stats
    sklearn.linear_model tensorboard.summary.writer.record_writer matplotlib.pyplot
    matplotlib.backends.backend_pdf pandas.io.formats.style pyarrow.dataset ipykernel.kernelapp"""
list(map(import_module, MODULES.split()))
# The collector would touch every object in every child, and so copy each page of what is shared
gc.freeze()
