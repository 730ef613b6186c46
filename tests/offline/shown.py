"""`python -m shown PAGE FILE`: nbdev-test, which writes PAGE with what its cells show to FILE."""

import sys

from fastcore.nbio import write_nb
from nbdev import test

test.write_nb = lambda made, _: write_nb(made, sys.argv[2])
test.nbdev_test(sys.argv[1], save=True)
