"""A setting is entered once: launchers, recipes, resume and the card of a release agree with c2lip.training.config."""

import inspect
from pathlib import Path

import pytest
import torch
import yaml

from c2lip.core import UserError
from c2lip.methods import find_methods
from c2lip.methods.c2lip import c2lip
from c2lip.towers import load
from c2lip.training.checkpoint import load_checkpoint, save_checkpoint
from c2lip.training.config import BY_MODEL, CHOSEN, MAY_CHANGE, Config, Launcher, Share, binding, complete
from c2lip.training.settings import AUTO, KINDS, allows, as_kind, check, declared_by, options_of
from c2lip.training.step import parameter_groups
from c2lip.workshop.parameters import read_parameters

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
LAUNCHERS = sorted(p for p in NBS.glob("*.ipynb") if read_parameters(p))
SETTINGS = declared_by(Config, Launcher)
METHODS, _ = find_methods()
OPTIONS = options_of(c2lip)
ASPECTS = {"default", "meaning", "rule", "type"}


def read_yaml(name):
    return yaml.safe_load((ROOT / "data" / name).read_text(encoding="utf8"))


def differences(parameter, setting):
    "In which aspects a launcher's parameter is not the setting of its name"
    found = set()
    if parameter.default != setting.default:
        found.add("default")
    if parameter.kind != setting.kind:
        found.add("type")
    if parameter.rule != setting.rule:
        found.add("rule")
    if parameter.help.removesuffix(parameter.rule) != setting.help.removesuffix(setting.rule):
        found.add("meaning")
    return found


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda p: p.stem)
def test_launchers_agree_with_the_settings(path):
    "Type, rule, meaning and default are those of the setting or method option; every exception is listed, and is one"
    excepted = read_yaml("launchers.yaml").get(path.stem, {})
    assert all(entry["because"] for entry in excepted.values())
    found = {}
    for name, parameter in read_parameters(path).items():
        one_place = SETTINGS.get(name) or OPTIONS.get(name)
        if one_place:
            found[name] = differences(parameter, one_place)
    listed = {name: set(entry["differs"]) for name, entry in excepted.items()}
    assert {name: aspects for name, aspects in found.items() if aspects} == listed
    assert set().union(*listed.values()) <= ASPECTS


def test_exceptions_are_of_launchers():
    assert set(read_yaml("launchers.yaml")) <= {p.stem for p in LAUNCHERS}


def test_train_declares_every_setting():
    "The front door: all settings, and the options of its default method"
    declared = read_parameters(NBS / "train.ipynb")
    assert set(declared) == set(SETTINGS) | set(OPTIONS)


def test_what_depends_on_the_model_is_auto():
    "Such a setting is auto in every launcher that fine-tunes a model, and each kind of model has a value of each"
    for kind, values in BY_MODEL.items():
        assert set(values) == set(CHOSEN), kind
        for name, value in values.items():
            value = value.of(100) if isinstance(value, Share) else value
            assert name == "alpha" or Config.of({name: value}) != Config.of({}), f"{kind}: {name}"
    assert {SETTINGS[name].default for name in CHOSEN if name != "alpha"} == {AUTO}
    assert SETTINGS["alpha"].default == 1.0  # the trainer by itself ends with what it trained; train.ipynb chooses
    declared = {
        name: read_parameters(NBS / f"{name}.ipynb") for name in ("train", "compare", "ablation", "interpolate")
    }
    for launcher, found in declared.items():
        assert {"lr", "warmup"} <= set(found), launcher
        assert all(found[name].default in (AUTO, [AUTO]) for name in CHOSEN if name in found), launcher


def test_settings_are_well_formed():
    "A default keeps its own rule and type; a line of a parameters cell holds meaning and rule"
    assert check(SETTINGS, {}) == {name: p.default for name, p in SETTINGS.items()}
    for name, p in SETTINGS.items():
        assert p.kind in KINDS and p.help and "=" not in p.help, name
        assert len(f"{name}: {p.kind} = {p.default!r}  # {p.help}") <= 120, name


def test_options_of_methods_are_well_formed():
    "A default keeps its own rule; no option has a setting's name, which would take its value"
    for method, function in METHODS.items():
        for name, p in options_of(function).items():
            assert name not in SETTINGS, f"{method}: {name} is a setting of the run"
            assert p.help, f"{method}: {name} needs a comment"
            if p.kind in KINDS:
                assert allows(p.rule, as_kind(p.kind, p.default)), f"{method}: {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "data" / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_hold_known_names_and_allowed_values(path):
    given = yaml.safe_load(path.read_text(encoding="utf8"))
    if path.stem in ("base", "base_clip"):  # of pretrain.ipynb, with a parameter of its own
        assert set(given) - set(SETTINGS) <= set(read_parameters(NBS / "pretrain.ipynb"))
        given = {name: value for name, value in given.items() if name in SETTINGS}
    found = complete(given)
    assert {name: found[name] for name in given} == given, "a value is read as something else"
    options = yaml.safe_load(given.get("method_options", "{}"))
    assert set(options) <= set(inspect.signature(METHODS[found["method"]]).parameters)


def test_smoke_holds_known_names_and_allowed_values():
    for name, given in read_yaml("smoke.yaml").items():
        found = check(read_parameters(NBS / f"{name}.ipynb"), given, f"data/smoke.yaml: {name}")
        assert {k: found[k] for k in given} == given, name


# ---- resume


def another(parameter):
    "A value that the setting allows and that is not its default"
    default, kind, rule = parameter.default, parameter.kind, parameter.rule
    if kind == "bool":
        return not default
    if default == AUTO and kind in ("int", "float"):
        return 1
    if rule.startswith("one of"):
        candidates = rule.removeprefix("one of: ").split(", ")
    elif kind == "str":
        candidates = [f"{default}x"]
    elif kind == "int":
        candidates = [default + 1]
    else:
        candidates = [default + 1, default / 2, 0.5]
    return next(v for v in candidates if v != default and allows(rule, v))


def test_a_checkpoint_belongs_to_every_setting_that_may_not_change():
    "Each of them, changed alone, changes what the checkpoint is bound to; each of the others does not"
    for name, p in (SETTINGS | OPTIONS).items():
        if name == "method":
            continue  # takes other options too
        one, other = Config.of({}), Config.of({name: another(p)})
        assert (binding(one) != binding(other)) == (name not in MAY_CHANGE), name
        if name not in MAY_CHANGE:
            assert binding(one)[name] != binding(other)[name]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    towers = load()
    method = c2lip(towers)
    optimizer = torch.optim.AdamW(parameter_groups(towers, method, Config(lr=1e-3)))
    save_checkpoint(tmp_path, towers, method, optimizer, 1, settings=binding(Config.of({})))
    for name, p in (SETTINGS | OPTIONS).items():
        cfg = Config.of({name: another(p)} if name != "method" else {"method": "clic"})
        if name in MAY_CHANGE:
            assert load_checkpoint(tmp_path, towers, method, optimizer, settings=binding(cfg)) == 1
        else:
            with pytest.raises(UserError, match=f"was made with {name} "):
                load_checkpoint(tmp_path, towers, method, optimizer, settings=binding(cfg))


# ---- library users and torchrun pass the launcher's checks


@pytest.mark.parametrize(
    "given, words",
    [
        ({"lr": 0}, "lr must be auto or a number above 0, at most 1, not 0"),
        ({"lr": "atuo"}, "lr must be auto or a number above 0, at most 1, not atuo; did you mean auto"),
        ({"warmup": "auto 5"}, "warmup must be auto or a whole number of at least 0, not auto 5"),
        ({"scalar_lr": "auto"}, "scalar_lr must be a number from 0 to 1000, not auto"),
        ({"epochs": "many"}, "epochs must be a number above 0, not 'many'|epochs must be a number above 0, not many"),
        ({"batches": "sharde"}, "batches must be one of: random, shared, neighbours, not .*did you mean shared"),
        ({"lamda_xac": 1}, "there is no setting 'lamda_xac'; did you mean lambda_xac"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"recompute": 1}, "recompute must be True or False"),
    ],
)
def test_config_of_checks(given, words):
    with pytest.raises(UserError, match=words) as e:
        Config.of(given)
    assert "\n" not in str(e.value)


def test_a_run_takes_what_another_method_s_launcher_gives_it():
    "train.ipynb passes its options of c2lip to every method; they have no effect there"
    cfg = Config.of({"method": "clic", "lambda_npc": 2.0, "plain_every": 0})
    assert cfg.options["plain_every"] == 0 and cfg.method == "clic"


# ---- the card of a release


def test_the_card_leaves_out_known_settings_only():
    from c2lip.release.card import HIDDEN_SETTINGS, WORLD_SETTINGS

    assert set(SETTINGS) >= HIDDEN_SETTINGS | WORLD_SETTINGS
