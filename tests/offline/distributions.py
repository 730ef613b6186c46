"""`python distributions.py FOLDER`: both distributions, offline, from a copy of the tree that is no git checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

LITTER = (".git", ".venv", ".*_cache", "runs", "_proc", "_docs", "build", "dist", "*.egg-info", "__pycache__", "cache")
root, home = Path(__file__).resolve().parents[2], Path(sys.argv[1])
shutil.copytree(root, home / "tree", ignore=shutil.ignore_patterns(*LITTER))
words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", home / "dist", home / "tree"]
done = subprocess.run(words, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
(home / "said").write_text(f"{done.returncode}\n{done.stdout}")
(home / "said").rename(home / "ended")
