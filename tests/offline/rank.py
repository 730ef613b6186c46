"""`python -m rank MODULE FUNCTION RANK FOLDER`: one of the processes of conftest.on_ranks."""

import sys
from importlib import import_module

if __name__ == "__main__":
    module, function, rank, folder = sys.argv[1:]
    getattr(import_module(module), function)(int(rank), folder)
