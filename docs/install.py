"""`uv pip install` into an environment: `python docs/install.py .venv/bin/python -c constraints.txt -e .`

pip brings uv where the machine has none. uv does not read pip's settings (index, certificates, proxy), so they are
handed over, unless uv has an index of its own. TORCH=cpu takes torch from its CPU index. Needs the standard library.
"""

import os
import shutil
import subprocess
import sys
from ast import literal_eval
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# pip's option: what uv calls it. Both names of a timeout are pip's, one in its files and one in its environment.
NAMES = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
OWN = {"UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX"}


def pips_settings(
    text: str,  # what `pip config list` prints: a line `section.option='value'` for each
) -> dict[str, str]:  # variable of uv → value
    "What pip is set to, as variables of uv; the environment's values come before those of pip's files"
    options = {}
    lines = [line.partition("=") for line in text.splitlines() if "='" in line or '="' in line]
    for name, _, value in sorted(lines, key=lambda line: line[0].startswith(":env:")):
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:") and option in NAMES:
            options[NAMES[option]] = " ".join(literal_eval(value).split())

    if "UV_EXTRA_INDEX_URL" in options:
        options["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip takes the best version of all its indexes
    if "UV_FIND_LINKS" in options:
        options["UV_FIND_LINKS"] = options["UV_FIND_LINKS"].replace(" ", ",")
    return options


def call(
    command: list,  # a program and its arguments
    **variables: str,  # added to the environment
) -> str:  # what it prints
    "Run a command; where it fails, print one line with the first and the last of its complaint, and exit"
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return done.stdout

    lines = [line.strip() for line in done.stderr.splitlines()]
    lines = [line.partition(": ")[2][:240] for line in lines if line.startswith(("error", "ERROR", "cause", "Caused"))]
    last = " ".join(done.stderr.split())[-240:] or f"it ended with {done.returncode}"
    complaint = "; ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else last
    way_out = "is the package index reachable, HOME or UV_CACHE_DIR a folder to write in, TORCH a name such as cpu?"
    sys.exit(f"c2lip: the packages could not be installed: {complaint}; {way_out}")


def is_uv(
    program: str,  # the path of one that is called uv
) -> bool:
    "Whether it says so, within some seconds"
    with suppress(OSError, subprocess.TimeoutExpired):
        version = subprocess.run([program, "--version"], capture_output=True, timeout=20).stdout
        return version.startswith(b"uv ")
    return False


def main(
    python: str,  # of the environment
    *options: str,  # of `uv pip install`
):
    "Install, by the uv of this machine or else by the one that pip puts beside this Python"
    places = (None, Path(sys.executable).parent)
    named = [shutil.which("uv", path=place) for place in places]
    uv = next(filter(is_uv, filter(None, named)), None)
    if not uv:
        pins = (ROOT / "constraints.txt").read_text(encoding="utf8").splitlines()
        pinned = [pin for pin in pins if pin.startswith("uv==")]
        call([sys.executable, "-m", "pip", "install", "-qq", "--retries", "2", *pinned])
        uv = shutil.which("uv", path=Path(sys.executable).parent)

    variables = {}
    if not OWN.intersection(os.environ):
        variables = pips_settings(call([sys.executable, "-m", "pip", "config", "list"]))
    if os.environ.get("TORCH"):
        variables["UV_TORCH_BACKEND"] = os.environ["TORCH"]
    call([uv, "pip", "install", "-q", "--python", python, *options], **variables)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
