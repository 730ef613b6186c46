"""All tests run offline, on one thread each, spread over the cores by pytest-xdist."""

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = ROOT / "tests" / "offline"
BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
sys.path.insert(0, str(OFFLINE))
# one file for this process, the workers and every process that they start: who was asked for in vain
if "C2LIP_REFUSED" not in os.environ:
    os.environ["C2LIP_REFUSED"] = tempfile.mkstemp(prefix="c2lip-refused-")[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OFFLINE), os.environ.get("PYTHONPATH")]))
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
    "TOKENIZERS_PARALLELISM": "false",
}
# A shell ignores Ctrl-C for what it starts by "&", and so would every process of the tests
signal.signal(signal.SIGINT, signal.default_int_handler)
if not hasattr(sys.modules.get("sitecustomize"), "_guard"):  # this process has none, or Debian's own
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # noqa: F401
gc.set_threshold(100_000, 20, 20)  # of a worker, which lives long

# Modules whose tests share nothing that is costly to make: their tests go to whichever worker is free.
# The tests of any other module run one after the other on one worker.
SPREAD_NAMES = "cluster fuzz gates launch notebooks own_images prepare resume site stranger"
SPREAD = {f"test_{name}" for name in SPREAD_NAMES.split()}
# The longest go first, tests or whole modules, so that no worker is left alone with one of them at the end.
LONGEST = (
    "walkthrough test_training test_explorer_browser test_outside test_killed_runs_end_in_the_same_bits "
    "test_package test_own_images test_recipes test_launchers test_same_bytes_under_ray test_cluster test_site "
    "test_prepare test_methods test_release test_concepts test_resume test_launch test_command "
    "nbs/tour test_stranger nbs/9_study/10_claims nbs/9_study/02_protocol nbs/explore nbs/study test_attacks_safe "
    "test_world test_suites test_plan".split()
)
QUICK = {"test_gates", "test_losses", "test_methods", "test_settings", "test_tables", "test_world"}
CLOUDS = {"169.254.169.254", "metadata.google.internal"}  # where Ray asks at its start whether it runs in one


@pytest.fixture(autouse=True)
def offline():
    "No test reaches another machine: the guard stands in this process and its children"
    assert socket.getaddrinfo.__name__ == "_lookup", "the offline guard is gone"


@pytest.fixture(scope="session")
def run():
    "run(words…, cwd=…): a command's result, its text in .out"

    def call(*words, cwd=ROOT, timeout=300, env=None, **kw):
        kw = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) | kw
        done = subprocess.run([str(w) for w in words], cwd=cwd, env=os.environ | (env or {}), timeout=timeout, **kw)
        done.out = done.stdout
        return done

    return call


def without_library():
    "The environment of a command that the library is not imported for, when it goes on in a fork"
    address = os.environ.get("C2LIP_FORKS")
    return {"C2LIP_FORKS": f"{address}-packages" if address else ""}


@pytest.fixture(scope="module")
def tiny_clip():
    "A CLIP with a class token, a grid unlike the base's and a middle crop, with the base's tokenizer"
    import open_clip
    import torch

    from c2lip.lab.world.base_model import BASE_CONFIG
    from c2lip.towers import Towers, load

    torch.manual_seed(0)
    config = dict(embed_dim=64, text_cfg=dict(BASE_CONFIG["text_cfg"], hf_tokenizer_name="c2lip-base"))
    config["vision_cfg"] = dict(image_size=64, patch_size=16, width=64, layers=2, head_width=32)
    model = open_clip.model.CustomTextCLIP(**config).eval()
    cfg = dict(size=64, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), interpolation="bicubic", resize_mode="shortest")
    return Towers(model, load("base").tokenizer, config | dict(custom_text=True), cfg, "tiny")


def free_port():
    "A port of this machine that nobody listens to"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def on_ranks(work, folder, ranks):
    "Run `work(rank, folder)` of a test's module in so many processes; where one fails, all end. Exit codes, or None"
    words = [sys.executable, "-m", "rank", work.__module__, work.__name__]
    jobs = [subprocess.Popen([*words, str(i), str(folder)], cwd=ROOT / "tests") for i in range(ranks)]
    while None in (codes := [job.poll() for job in jobs]) and not any(codes):
        time.sleep(0.02)
    time.sleep(0.3 * any(codes))  # others may be ending too
    codes = [job.poll() for job in jobs]
    for job in jobs:
        job.kill()
        job.wait()
    return codes


def pytest_configure(config):
    "In a run of many processes, those that import the library go on in a fork of one that has imported it"
    config.option.loadscopereorder = False  # xdist would begin with the modules of most tests, and end with the longest
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None) and not config.option.markexpr:
        os.environ["C2LIP_FORKS"] = os.path.join(tempfile.mkdtemp(prefix="c2lip-"), "forks")
        subprocess.Popen([sys.executable, OFFLINE / "forks.py", os.environ["C2LIP_FORKS"]], start_new_session=True)
        if not config.option.keyword and config.args == config.getini("testpaths"):  # one core is idle until then
            config.built = os.environ["C2LIP_BUILT"] = tempfile.mkdtemp(prefix="c2lip-")
            subprocess.Popen([sys.executable, OFFLINE / "distributions.py", os.environ["C2LIP_BUILT"]])


def _place(item):
    "Where a test stands in LONGEST, by its own name or its module's; after those modules come first, single tests last"
    found = (place for place, name in enumerate(LONGEST) if name in item.nodeid)
    return next(found, len(LONGEST) + (item.path.stem in SPREAD))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    "Longest first; what shares a costly fixture stays together; fast modules are marked"
    items.sort(key=_place)
    for item in items:
        if item.path.stem not in SPREAD:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.path.stem in QUICK and "long" not in item.name:
            item.add_marker(pytest.mark.quick)


def pytest_sessionfinish(session):
    "At the very end, where all workers are through: nothing may have asked for another machine"
    if hasattr(session.config, "workerinput"):
        return
    shutil.rmtree(getattr(session.config, "built", ""), ignore_errors=True)  # a run inside of a test leaves them
    log = Path(os.environ["C2LIP_REFUSED"])
    asked = set(log.read_text().split()) - CLOUDS - {"example.org"}  # example.org: the test that the guard works
    log.unlink()
    if asked:
        print(f"\nconnections to other machines were asked for, and refused: {', '.join(sorted(asked))}")
        session.exitstatus = 1
