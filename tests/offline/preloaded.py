"""What the tests' processes are forked with (conftest), so that none of them has to import or to load it again."""

import gc

import matplotlib.pyplot  # noqa: F401
import nbdev.test  # noqa: F401
import papermill  # noqa: F401
import pytest  # noqa: F401
import scipy.stats  # noqa: F401
import sklearn.linear_model  # noqa: F401
import tensorboard.summary.writer.record_writer  # noqa: F401

import c2lip.attention.explorer  # noqa: F401
import c2lip.data.prepare  # noqa: F401
import c2lip.training.run  # noqa: F401
from c2lip.concepts import load_pipeline

load_pipeline()
# The collector would touch every object in every child, and so copy each page of what is shared
gc.freeze()
