"""Recipes: mergekit's words, read as mergekit reads them, and refused by name where they go further."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaugekit.errors import ConfigError
from gaugekit.verbs.recipes import Align, Recipe, for_mergekit, read_recipe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what mergekit imports
    from mergekit.config import MergeConfiguration

TIES = """
merge_method: ties
base_model: base
models:
  - model: base
  - model: one
    parameters: {weight: 0.5, density: 0.6}
  - model: two
    parameters:
      weight: 3e-1
parameters: {normalize: 1, lambda: 0.8, density: 0.4, int8_mask: true}
dtype: bfloat16
"""
LINEAR = """
merge_method: linear
models:
  - model: one
    parameters: {weight: 0.25}
  - model: two
    parameters: {weight: 0.75}
"""
SLERP = """
merge_method: slerp
base_model: one
models:
  - model: two
parameters: {t: 0.3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("base", "one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "words.txt").write_text("some words")
    return tmp_path


def read(folder: Path, text: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return read_recipe(path)


def test_task_vectors(folder: Path) -> None:
    recipe = read(folder, TIES)
    s = recipe.settings
    assert recipe.reference == str(folder / "base")
    assert recipe.others == (str(folder / "one"), str(folder / "two"))
    assert (s.method, s.weights, s.densities) == ("ties", (0.5, 0.3), (0.6, 0.4))
    assert (s.normalize, s.rescale, s.scale, s.seed) == (True, False, 0.8, 0)
    assert recipe.dtype == "bfloat16"
    assert recipe.align == Align("weights", None)


def test_linear_takes_the_first_as_reference(folder: Path) -> None:
    recipe = read(folder, LINEAR)
    assert (recipe.reference, recipe.others) == (str(folder / "one"), (str(folder / "two"),))
    assert recipe.settings.weights == (0.25, 0.75)
    assert recipe.settings.normalize
    # Another reference has its weight first, whatever the order of the list.
    recipe = read(folder, LINEAR + "base_model: ./two\n")
    assert recipe.others == (str(folder / "one"),)
    assert recipe.settings.weights == (0.75, 0.25)
    recipe = read(folder, LINEAR + "base_model: base\nparameters: {weight: 2}\n")
    assert recipe.settings.weights == (2.0, 0.25, 0.75)


def test_slerp_with_the_base_listed_or_not(folder: Path) -> None:
    recipe = read(folder, SLERP)
    listed = read(folder, SLERP.replace("  - model: two", "  - model: two\n  - model: one"))
    for each in (recipe, listed):
        assert (each.reference, each.others) == (str(folder / "one"), (str(folder / "two"),))
        assert (each.settings.t, each.settings.weights) == (0.3, ())


@pytest.mark.parametrize(
    ("method", "normalize", "rescale"),
    [
        ("task_arithmetic", False, False),
        ("ties", True, False),
        ("dare_linear", False, True),
        ("dare_ties", False, True),
    ],
)
def test_defaults(folder: Path, method: str, normalize: bool, rescale: bool) -> None:
    text = f"merge_method: {method}\nbase_model: base\nmodels: [{{model: one}}]\nparameters: {{weight: 1}}\n"
    s = read(folder, text).settings
    assert (s.normalize, s.rescale, s.scale, s.weights) == (normalize, rescale, 1.0, (1.0,))
    assert s.densities == (() if method == "task_arithmetic" else (1.0,))


@pytest.mark.parametrize(
    ("text", "align"),
    [
        ("align: none", None),
        ("align: {}", Align("weights", None)),
        ("align: {cost: activations, text: words.txt}", Align("activations", Path("words.txt"))),
    ],
)
def test_what_is_ours(folder: Path, text: str, align: Align | None) -> None:
    found = read(folder, f"{LINEAR}{text}\nseed: 7\n")
    if align is not None and align.text is not None:
        align = Align(align.cost, folder / align.text)
    assert found.align == align
    assert found.settings.seed == 7


def test_where_paths_begin(folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    """In the recipe's folder where they exist there, else where the command runs; else they are hub ids."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "three").mkdir()
    (elsewhere / "one").mkdir()
    monkeypatch.chdir(elsewhere)
    text = LINEAR.replace("model: two", "model: three") + "  - {model: org/four@main, parameters: {weight: 1}}\n"
    recipe = read(folder, text)
    assert (recipe.reference, recipe.others) == (str(folder / "one"), ("three", "org/four@main"))


REFUSED = [
    (LINEAR + "slices: []", "slices is not supported: whole models"),
    (LINEAR + "tokenizer_source: union", "tokenizer_source is not supported"),
    (LINEAR + "out_dtype: float16", "out_dtype is not supported: .* say dtype"),
    (LINEAR + "base_modle: base", "unknown key base_modle: did you mean base_model"),
    (LINEAR.replace("linear", "della"), "merge_method must be one of linear, slerp, .*, got 'della'"),
    (LINEAR + "dtype: int8", "dtype must be one of .* got 'int8'"),
    (LINEAR + "dtype: [1]", "dtype must be one of"),
    (LINEAR + "parameters: {t: 0.5}", "parameters of linear: unknown parameter t"),
    (LINEAR + "parameters: {density: 0.5}", "unknown parameter density"),
    (LINEAR + "parameters: {normalize: maybe}", "normalize must be true or false, got 'maybe'"),
    (LINEAR.replace("0.25", "-0.75"), "the weights sum to zero"),
    (LINEAR.replace("0.25", "[0, 1]"), "values that differ by layer or tensor are not supported"),
    (LINEAR.replace("0.25", "much"), "weight of .*one must be a number, got 'much'"),
    (LINEAR.replace("0.25", ".inf"), "must be a number"),
    (LINEAR.replace("0.25", "true"), "must be a number"),
    (LINEAR.replace("weight: 0.25", ""), "weight of .*one is missing: linear needs one"),
    (LINEAR.replace("weight: 0.25", "scale: 1"), "model 1: parameters of linear: unknown parameter scale"),
    (LINEAR.replace("model: two", "model: ./one"), "one is listed twice"),
    (LINEAR.replace("model: two", "model: {path: two}"), "a model is a path or a hub id"),
    (LINEAR.replace("model: two", "name: two"), "model 2 must be a mapping with a key model"),
    (LINEAR + "base_model: base", "weight of .*base is missing"),
    (LINEAR + "seed: x", "seed must be a whole number"),
    (LINEAR + "align: rotate", "align must be none, or a mapping"),
    (LINEAR + "align:", "align must be none, or a mapping"),
    (LINEAR + "align: {cost: outputs}", "cost must be one of weights, activations"),
    (LINEAR + "align: {costs: weights}", "unknown key costs: did you mean cost"),
    (LINEAR + "align: {cost: activations}", "cost activations and refine want a text"),
    (LINEAR + "align: {refine: 10}", "cost activations and refine want a text"),
    (LINEAR + "align: {refine: -1}", "refine must be a number of steps, got -1"),
    (LINEAR + "align: {observable: loss}", "observable must be one of logprobs, logits, hidden, similarities"),
    (LINEAR + "align: {text: none.txt}", "there is no text none.txt"),
    ("merge_method: linear\nmodels: [{model: one}]\nparameters: {weight: 1}", "there is one model only"),
    ("merge_method: linear\nmodels: one", "models must be a list"),
    ("merge_method: ties\nmodels: [{model: one}, {model: two}]", "ties needs a base_model"),
    (SLERP.replace("parameters: {t: 0.3}", ""), "slerp needs parameters: t"),
    (SLERP.replace("0.3", "1.3"), "t must lie between 0 and 1"),
    (SLERP.replace("0.3", "[{filter: mlp, value: 1}, {value: 0}]"), "values that differ by layer or tensor"),
    (SLERP.replace("  - model: two", "  - model: two\n  - model: base"), "slerp goes from one model to another"),
    (SLERP.replace("base_model: one", ""), "slerp needs a base_model"),
    (TIES.replace("density: 0.6", "density: 0"), "density of .*one must be above 0 and at most 1, got 0"),
    (TIES.replace("density: 0.6", "density: 1.5"), "must be above 0 and at most 1, got 1.5"),
    (TIES.replace("- model: base", "- model: base\n    parameters: {weight: 1}"), "the base_model .* has parameters"),
    (TIES.replace("weight: 0.5", "weight: -0.3"), "the weights sum to zero"),
    ("- 1", "a recipe is a mapping"),
    ("", "a recipe is a mapping"),
    ("merge_method: linear\nmerge_method: slerp", "no YAML: .*merge_method is there twice"),
    ("models: [", "no YAML"),
    ("seed: 2020-13-45", "no YAML"),
    ("merge_method: [linear]", "merge_method must be one of"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(folder, text)
    assert str(caught.value).startswith(str(folder / "recipe.yaml"))
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", [TIES, LINEAR, LINEAR + "base_model: ./two", SLERP])
def test_mergekit_reads_what_is_written_for_it(folder: Path, text: str) -> None:
    recipe = read(folder, text + "\nseed: 3\nalign: {cost: weights}\n")
    odd = folder / "a+b@c"  # where mergekit would see an adapter and a revision
    places = {where: odd / Path(where).name for where in (recipe.reference, *recipe.others)}
    written = for_mergekit(recipe, places)
    document = yaml.safe_load(written)
    assert not {"seed", "align"} & document.keys()
    config = MergeConfiguration.model_validate(document)
    assert config.base_model is not None and config.models is not None
    assert (config.base_model.model.path, config.base_model.lora) == (str(odd / Path(recipe.reference).name), None)
    given = yaml.safe_load(text)
    assert [each.model.model.path for each in config.models] == [
        str(odd / Path(each["model"]).name) for each in given["models"]
    ]
    for key in ("merge_method", "parameters", "dtype"):
        assert document.get(key) == given.get(key)
    plain = yaml.safe_load(for_mergekit(recipe, {where: Path("/models") / Path(where).name for where in places}))
    assert plain["models"][0]["model"] == f"/models/{Path(given['models'][0]['model']).name}"
