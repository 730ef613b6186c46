"""A setting is entered once: launchers, recipes, resume and the card agree with c2lip.lab.training.config."""

import pytest
import torch
from conftest import ROOT

from c2lip.core import UserError
from c2lip.core.files import read_yaml, shipped
from c2lip.lab.data.sources import open_data
from c2lip.lab.relatives import find_methods
from c2lip.lab.training import config
from c2lip.lab.training.checkpoint import binding, load_checkpoint, save_checkpoint
from c2lip.lab.training.config import AUTO, MAY_CHANGE, SETTING_KINDS, Config, check, complete, read_methods
from c2lip.lab.training.launchers import launcher_settings, read_parameters
from c2lip.lab.training.run import set_up
from c2lip.lab.training.step import BY_MODEL, CHOSEN, parameter_groups
from c2lip.methods.c2lip import c2lip
from c2lip.towers import HIDDEN_SETTINGS, load

NBS = ROOT / "nbs"
SETTINGS = config.settings_of()
METHODS, _ = find_methods()
OPTIONS = read_methods()["c2lip"]


def test_what_depends_on_the_model_is_auto():
    "Each kind of model has a value of each such setting, and launchers leave them to the model"
    for kind, values in BY_MODEL.items():
        assert set(values) == set(CHOSEN), kind
        check(SETTINGS, values)
    assert {SETTINGS[name].default for name in CHOSEN if name != "alpha"} == {AUTO}
    assert SETTINGS["alpha"].default == 1.0  # the trainer by itself ends with what it trained; train.ipynb chooses
    for launcher in ("train", "compare"):
        shown = read_parameters(NBS / f"{launcher}.ipynb")
        assert all(shown[name].default == AUTO for name in CHOSEN if name in shown), launcher


def test_train_takes_every_setting_and_runs_with_the_defaults():
    "Those that its cell shows have the defaults of the settings but for these five"
    train = launcher_settings(NBS / "train.ipynb")
    assert set(train) == set(SETTINGS) | set(OPTIONS)
    other = {name for name, s in train.items() if s.default != (SETTINGS | OPTIONS)[name].default}
    assert other == {"alpha", "images", "epochs", "lambda_npc", "lambda_xac"}
    assert train["lambda_npc"].range == OPTIONS["lambda_npc"].range


def test_settings_are_well_formed():
    "A default keeps its own range and type, and each has a meaning"
    assert check(SETTINGS, {}) == {name: s.default for name, s in SETTINGS.items()}
    assert all(s.kind in SETTING_KINDS and s.help for s in SETTINGS.values())
    assert set(SETTINGS) >= MAY_CHANGE
    assert set(SETTINGS) >= HIDDEN_SETTINGS, "the card leaves out known settings only"
    for method in METHODS:
        options = read_methods()[method]
        assert not set(options) & set(SETTINGS), f"{method} takes a setting of the run as its own"
        check({name: s for name, s in options.items() if s.default is not None}, {})
        numbers = [s for s in options.values() if s.kind in ("int", "float")]
        assert not any(s.range.holds(wrong) for s in numbers for wrong in (float("nan"), -1)), method


def test_small_runs_hold_known_names_and_allowed_values():
    for launcher, given in read_yaml(shipped("smoke.yaml")).items():
        settings = check(launcher_settings(NBS / f"{launcher}.ipynb", given), given, launcher)
        assert {name: settings[name] for name in given} == given, "a value is read as something else"


def another(name, setting):
    "A value that the setting allows and that is not its default"
    default = setting.default
    if setting.kind in ("bool", "dict", "str", "Regex"):
        words = [word for word in setting.words or (f"{default}x",) if word != default]
        return {"bool": not default, "dict": {"x": 1}}.get(setting.kind, words[0])
    candidates = [1] if default == AUTO else [default + 1, default / 2, 0.5]
    for value in candidates:
        try:
            return check({name: setting}, {name: value})[name]
        except UserError:
            continue

    raise AssertionError(name)


def test_a_checkpoint_belongs_to_every_setting_that_may_not_change(tmp_path):
    "Each of them, changed alone, changes what the checkpoint is bound to, and then it is refused; the others do not"
    towers = load()
    records = open_data("world", images=64)
    method = c2lip(towers)
    optimizer = torch.optim.AdamW(parameter_groups(towers, method, Config(lr=1e-3)))
    save_checkpoint(tmp_path, towers, method, optimizer, 1, settings=binding(Config.of({}), records))

    for name, setting in (SETTINGS | OPTIONS).items():
        cfg = Config.of({name: another(name, setting)} if name != "method" else {"method": "clic"})
        if name in MAY_CHANGE:
            assert load_checkpoint(tmp_path, towers, method, optimizer, settings=binding(cfg, records)) == 1
        else:
            with pytest.raises(UserError, match=f"was made with {name} "):
                load_checkpoint(tmp_path, towers, method, optimizer, settings=binding(cfg, records))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"lr": 0}, "lr must be auto or a number above 0, at most 1, not 0"),
        ({"lr": "atuo"}, "lr must be auto or a number above 0, at most 1, not 'atuo'; did you mean auto"),
        ({"warmup": "auto 5"}, "warmup must be auto or a whole number at least 0, not 'auto 5'"),
        ({"scalar_lr": "auto"}, "scalar_lr must be a number from 0 to 1000, not 'auto'"),
        ({"epochs": "many"}, "epochs must be a number above 0, at most 100,000, not 'many'"),
        ({"batches": "neighbour"}, "batches must be one of: random, .*neighbours, not .*did you mean neighbours"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"trainable": "(visual"}, r"trainable must be a regular expression, not '\(visual"),
        ({"data": "\udcff"}, "data must be a text, not "),
        ({"phrase_rules": "[1]"}, "phrase_rules must be a mapping of the form {name: value, …}, not "),
    ],
)
def test_config_of_checks(given, words):
    with pytest.raises(UserError, match=words) as e:
        Config.of(given)
    assert "\n" not in str(e.value)


def test_settings_are_checked_once(monkeypatch, tmp_path):
    "What is made of them is checked anew. train.ipynb passes its options of c2lip to every method"
    settings = complete({"method": "clic", "lambda_npc": 2, "plain_every": "0", "images": 16, "batch_size": 8})
    monkeypatch.setattr(config, "check", lambda declared, given: pytest.fail("checked again"))
    setup = set_up(settings, tmp_path)
    setup.lock.close()
    assert setup.settings.items() >= {"lambda_npc": 2.0, "plain_every": 0, "images": 16}.items()
    with pytest.raises(pytest.fail.Exception):
        set_up(settings | {"lr": 0}, tmp_path)
