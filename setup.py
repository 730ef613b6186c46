"""Everything about the package stands in settings.ini; this file hands it to setuptools."""
import json
import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

root = Path(__file__).resolve().parent
parser = ConfigParser(delimiters=["="])
parser.read(root/"settings.ini", encoding="utf8")
cfg = parser["DEFAULT"]
lib, python = cfg["lib_name"], cfg["min_python"]
readme = root/"README.md"
stages = {"1": "1 - Planning", "2": "2 - Pre-Alpha", "3": "3 - Alpha", "4": "4 - Beta", "5": "5 - Production/Stable"}


# Of the extras, `lab` is all that the launchers need; `dev` is everything
EXTRAS = {name: cfg[f"{name}_requirements"].split() for name in ("lab", "search", "ray", "onnx", "serve", "dev")}
EXTRAS["dev"] = [requirement for extra in EXTRAS.values() for requirement in extra]
LEFT_OUT = ("cache", "results", "*.tmp", ".*")  # the records of the study stay in the repository,
RECORDS = ("readings",)  # but for the tables that train compares with


class BuildWithData(build_py):
    "Put data/ and two launchers into the package as shipped/, where c2lip.core.files.shipped looks"

    def run(self):
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib)/lib/"shipped"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(root/"data", target, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for name in RECORDS:
            (target/"results"/name).mkdir(parents=True, exist_ok=True)
            shutil.copy(root/"data"/"results"/name/"trials.csv", target/"results"/name)
        (target/"nbs").mkdir()
        for name in ("train", "evaluate"):
            notebook = json.loads((root/"nbs"/f"{name}.ipynb").read_text(encoding="utf8"))
            for cell in notebook["cells"]:
                if "outputs" in cell:
                    cell["outputs"] = []
            (target/"nbs"/f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf8")


setup(
    name=lib,
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf8") if readme.is_file() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"] or None,
    url=cfg["git_url"] or None,
    keywords=cfg["keywords"].split(),
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        f"Development Status :: {stages[cfg['status']]}",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        "Programming Language :: Python :: 3",
    ],
    python_requires=f">={python}",
    packages=find_packages(include=[lib, f"{lib}.*"]),
    package_data={lib: ["py.typed"]},
    cmdclass={"build_py": BuildWithData},
    install_requires=cfg["requirements"].split(),
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": cfg.get("console_scripts", "").split(),
        "nbdev": [f"{lib}={lib}._modidx:d"],
        # papermill loads this at its start: it is what lets `papermill nbs/train.ipynb` run as typed
        "papermill.engine": [f"{lib}={lib}.lab.training.launch:Engine"],
    },
    zip_safe=False,
)
