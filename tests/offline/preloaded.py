"""What the tests' processes are forked with (forks.py), so that none of them has to import or to load it again."""

import gc
import weakref
from importlib import import_module

from c2lip.concepts import load_pipeline
from c2lip.lab.evaluation.suites import benchmark_folder, evaluate
from c2lip.towers import load

MODULES = "papermill c2lip.lab.attention.panel c2lip.lab.data.prepare c2lip.lab.training.run c2lip.lab.study.trials"
list(map(import_module, MODULES.split()))
load_pipeline()
# The phrases of the texts that small evaluations share, and what the first one reads
for split in ("validation", "test"):
    evaluate(load("base"), benchmark_folder("world", split, items=2, images=20), progress=False)
for finalizer in weakref.finalize._registry:  # torch has 200, which take a twentieth of a second in every child
    finalizer.atexit = False
gc.freeze()
