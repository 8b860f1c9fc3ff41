"""Configs from YAML and from words: what is read is what was meant, and everything else is one line that says where."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaugekit.errors import ConfigError
from gaugekit.training.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from gaugekit.training.reading import from_dict, read

FULL = Config(
    ModelConfig(
        vocab=300,
        width=96,
        layers=3,
        heads=6,
        kv_heads=2,
        hidden=100,
        norm="rms",
        norm_options={"eps": 1e-4, "bias": True},
        placement="peri",
        positions="rotary",
        rotary_base=500.0,
        mlp="swiglu",
        bias=True,
        tied=True,
        init_std=0.1,
    ),
    DataConfig("text.txt", "bpe", 500, "words", 0.2, "/somewhere"),
    OptimizerConfig("muon", 3e-4, 0.1, (0.8, 0.99), 1e-6, 0.8, 0.5, {"ns_steps": 3, "nesterov": False}),
    ScheduleConfig("logarithmic", 5, 0.0, math.inf),
    RunConfig(7, 6, 3, 1, "bfloat16", True, "cuda", 1, 0, 2, 3, 4, "wandb", "mine"),
)


def written(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("config", [Config(), FULL], ids=["defaults", "everything"])
def test_round_trip(config: Config, tmp_path: Path) -> None:
    for section in fields(config):  # nothing is left at its default by FULL
        own, plain = getattr(config, section.name), getattr(Config(), section.name)
        assert config is not FULL or all(
            getattr(own, key.name) != getattr(plain, key.name)
            for key in fields(own)
            if key.name not in ("attention", "score", "frame", "values", "residual", "context")
        )
    path = written(tmp_path, yaml.safe_dump(config.to_dict()))
    assert read(path) == config
    assert read(path).to_dict() == config.to_dict()
    assert from_dict(Config, config.to_dict()) == config


def test_defaults() -> None:
    assert read(None) == Config()
    assert Config().model.head_dim == 32


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n", "---\n"])
def test_an_empty_file_is_all_defaults(text: str, tmp_path: Path) -> None:
    assert read(written(tmp_path, text)) == Config()


def test_words_go_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "model: {width: 64, norm: rms}\nrun:\n  steps: 5\n")
    words = [
        "model.width=96",
        "model.norm_options.eps=1e-3",
        "model.tied=true",
        "optimizer.betas=[0.5, 0.6]",
        "optimizer.options={amsgrad: true}",
        "data.source=a=b.txt",
        "run.device=cuda",
        "run.steps=6",
        "run.steps=7",
    ]
    expected = Config(
        ModelConfig(width=96, norm="rms", norm_options={"eps": 1e-3}, tied=True),
        DataConfig(source="a=b.txt"),
        OptimizerConfig(betas=(0.5, 0.6), options={"amsgrad": True}),
        run=RunConfig(steps=7, device="cuda"),
    )
    assert read(path, words) == expected
    assert read(None, ["model.width=96"]).model == ModelConfig(width=96)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("3E-4", 3e-4),
        ("'3e-4'", 3e-4),
        ("3.0e-4", 3e-4),
        ("+1e2", 100.0),
        ("1.e-2", 0.01),
        (".5e0", 0.5),
        ("1", 1.0),
        ("0.5", 0.5),
    ],
)
def test_numbers(text: str, value: float, tmp_path: Path) -> None:
    """YAML 1.1 takes 3e-4 for text."""
    read_back = read(written(tmp_path, f"optimizer:\n  lr: {text}\n"))
    assert read_back.optimizer.lr == read(None, [f"optimizer.lr={text}"]).optimizer.lr == value
    assert type(read_back.optimizer.lr) is float


def test_numbers_inside_options_are_numbers() -> None:
    """Where no type is known, text would go to a norm or an optimizer."""
    config = read(None, ["model.norm_options={eps: 1e-3}", "optimizer.options.gate=5e-1", "optimizer.name=gated_adamw"])
    assert config.model.norm_options == {"eps": 1e-3}
    assert config.optimizer.options == {"gate": 0.5}


def test_text_that_only_looks_like_a_number() -> None:
    assert read(None, ["data.source='1e3'"]).data.source == "1e3"
    assert read(None, ["data.source=3e-4.txt"]).data.source == "3e-4.txt"


# --- refused --------------------------------------------------------------------------------------------------

WORDS: list[tuple[str, str]] = [
    ("model.wdith=3", r"config\.model: unknown key wdith: did you mean width\?$"),
    ("modle.width=3", r"config: unknown key modle: did you mean model\?$"),
    ("model.zzz=3", r"config\.model: unknown key zzz: it may be vocab, context, width"),
    ("optimizer.learning_rate=3", r"config\.optimizer: unknown key learning_rate: it may be name, lr"),
    ("model.width=wide", r"config\.model\.width: must be a whole number, got 'wide'"),
    ("model.width=1.5", r"config\.model\.width: must be a whole number, got 1\.5"),
    ("model.width=true", r"config\.model\.width: must be a whole number, got True"),
    ("model.width=", r"config\.model\.width: must be a whole number, got None"),
    ("model.tied=1", r"config\.model\.tied: must be true or false, got 1"),
    ("optimizer.lr=fast", r"config\.optimizer\.lr: must be a number, got 'fast'"),
    ("optimizer.lr=true", r"config\.optimizer\.lr: must be a number, got True"),
    ("optimizer.lr=.nan", r"config\.optimizer\.lr: must be a number, got nan"),
    ("optimizer.lr=[1]", r"config\.optimizer\.lr: must be a number, got \[1\]"),
    ("data.source=7", r"config\.data\.source: must be text, got 7"),
    ("model.norm=rmsnorm", r"config\.model\.norm: must be one of layer, rms, prms.*none, got 'rmsnorm'"),
    ("model.positions=no", r"config\.model\.positions: must be one of learned, rotary, none, got False"),
    ("optimizer.name=lion", r"config\.optimizer\.name: must be one of adamw, sgd, muon"),
    ("optimizer.betas=0.9", r"config\.optimizer\.betas: must be a list of 2 numbers, got 0\.9"),
    ("optimizer.betas=[0.9]", r"config\.optimizer\.betas: must be a list of 2 numbers, got \[0\.9\]"),
    ("optimizer.betas=[0.9, x]", r"config\.optimizer\.betas: must be a number, got 'x'"),
    ("model.norm_options=[]", r"config\.model\.norm_options: must be a mapping, got \[\]"),
    ("model=3", r"config\.model: must be a section with keys of its own, got 3"),
    ("model.width", r"'model\.width': options are section\.key=value"),
    ("model.=3", r"'model\.=3': options are section\.key=value"),
    ("model.width.x=3", r"config\.model\.width: must be a whole number, got \{'x': 3\}"),
    ("model.width={", r"'model\.width=\{': no YAML"),
    ("model.width={a: 1, a: 2}", r"no YAML"),
    ("optimizer.lr=0", r"optimizer\.lr must be positive, got 0\.0"),
    ("optimizer.lr=.inf", r"optimizer\.lr must be positive, got inf"),
    ("optimizer.weight_decay=-1", r"optimizer\.weight_decay must be 0 or more, got -1\.0"),
    ("optimizer.clip=-1", r"optimizer\.clip must be 0 or more, got -1\.0"),
    ("schedule.warmup=1000", r"schedule\.warmup must be from 0 to run\.steps - 1 = 999, got 1000"),
    ("schedule.warmup=-1", r"schedule\.warmup must be from 0"),
    ("schedule.final=1.5", r"schedule\.final is a share between 0 and 1, got 1\.5"),
    ("schedule.rho=0", r"schedule\.rho must be above 0, got 0\.0"),
    ("data.held_out=1", r"data\.held_out is a share between 0 and 1, got 1\.0"),
    ("run.steps=0", r"run\.steps must be at least 1, got 0"),
    ("run.keep=0", r"run\.keep must be at least 1, got 0"),
    ("run.save_every=-1", r"run\.save_every must be 0 \(at the end only\) or more, got -1"),
    ("run.accumulation=3", r"run\.accumulation=3 does not divide run\.batch=16"),
    ("run.seed=-1", r"run\.seed must be from 0 to 2\^63 - 1, got -1"),
    ("run.seed=9223372036854775808", r"run\.seed must be from 0 to 2\^63 - 1, got 9223372036854775808"),
    ("optimizer.eps=.inf", r"optimizer\.eps must be 0 or more, got inf"),
    ("optimizer.momentum=-1", r"optimizer\.momentum must be 0 or more, got -1\.0"),
    (f"optimizer.lr=1{'0' * 400}", r"config\.optimizer\.lr: must be a number, got 1"),
    ("data={tokenizer: bpe, vocab: 256}", r"data\.vocab must be at least 257 for bpe, 256 bytes and a merge, got 256"),
    ("data.source=2020-13-45", r"'data\.source=2020-13-45': no YAML"),
    ("data.source=!!timestamp x", r"no YAML"),
    ("model.heads=3", r"model\.heads=3 does not divide model\.width=128"),
]


@pytest.mark.parametrize(("word", "message"), WORDS, ids=[word for word, _ in WORDS])
def test_bad_words(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(None, [word])
    assert "\n" not in str(caught.value)


FILES: list[tuple[str, str]] = [
    ("model: [\n", r"run\.yaml: no YAML: "),
    ("model:\n\twidth: 3\n", r"run\.yaml: no YAML: "),
    ("!!python/object:os.system {}\n", r"run\.yaml: no YAML: "),
    ("- 1\n", r"run\.yaml: must be a mapping of sections to keys, got a list"),
    ("just text\n", r"run\.yaml: must be a mapping of sections to keys, got a str"),
    ("model:\n  wdith: 3\n", r"run\.yaml: model: unknown key wdith: did you mean width\?$"),
    ("model:\n  width: x\n", r"run\.yaml: model\.width: must be a whole number, got 'x'"),
    ("model:\n", r"run\.yaml: model: must be a section with keys of its own, got None"),
    ("data: {source: 2020-13-45}\n", r"run\.yaml: no YAML: ValueError: month"),
    ("3: 4\n", r"run\.yaml: unknown key 3: it may be model, data"),
    ("run: {steps: 3}\nmodel: {width: 4}\nrun: {seed: 1}\n", r"run\.yaml: no YAML: run is there twice"),
    ("model:\n  width: 8\n  width: 16\n", r"run\.yaml: no YAML: width is there twice"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=range(len(FILES)))
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read \(No such file or directory\)"):
        read(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        read(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"data: {source: caf\xe9}\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: cannot be read \('utf-8' codec"):
        read(path)


def test_what_is_read_is_checked_as_a_whole(tmp_path: Path) -> None:
    path = written(tmp_path, "run: {steps: 10}\nschedule: {warmup: 5}\n")
    assert read(path).schedule.warmup == 5
    with pytest.raises(ConfigError, match=r"schedule\.warmup must be from 0 to run\.steps - 1 = 3, got 5"):
        read(path, ["run.steps=4"])
    with pytest.raises(ConfigError, match=r"model\.score=rbf is of attention=relational"):
        read(None, ["model.score=rbf"])
    assert read(None, ["model.score=rbf", "model.attention=relational"]).model.score == "rbf"


def test_a_config_does_not_change(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": {"width": 64, "norm_options": {"eps": 1e-3}}}
    before = yaml.safe_dump(given)
    config = from_dict(Config, given)
    replace(config.model, width=32)
    assert yaml.safe_dump(given) == before
    assert config.model.width == 64
    with pytest.raises(AttributeError):
        config.model.width = 3  # type: ignore[misc]
