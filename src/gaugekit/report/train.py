"""Training in the terminal: what came out of a run, and what one would take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.tables import header
from gaugekit.report.text import count, path_name, plural, size

if TYPE_CHECKING:
    from gaugekit.training.estimate import Estimate
    from gaugekit.training.train import TrainReport

HOW = (
    "Weights, gradients and optimizer are exact, of all processes together. Activations are what one process keeps for "
    "the backward pass of {}; what is needed for a moment only comes on top."
)


def render(report: TrainReport) -> RenderableType:
    steps = plural(report.steps, "step")
    if 0 < report.resumed < report.steps:
        steps += f", of which {count(report.resumed)} earlier"
    facts = [
        ("parameters", count(report.parameters)),
        ("steps", f"{steps}; {count(report.tokens)} tokens"),
        ("training loss", f"{report.loss:.4f} nats a token, in the last step"),
        ("held-out loss", f"{report.held_out:.4f} nats a token"),
        ("speed", f"{count(round(report.tokens_per_second))} tokens/s{_processes(report.processes)}"),
        ("checkpoint", report.checkpoint),
        ("model", f"{report.model} ({report.architecture})"),
    ]
    return Group(*header(path_name(report.out), facts))


def render_estimate(report: Estimate) -> RenderableType:
    most = "" if report.vocab_known else " at most"
    facts = [
        ("vocabulary", f"{count(report.vocab)}{most}"),
        ("parameters", f"{count(report.parameters)}, {count(report.parameters_without_tables)} without embeddings"),
        ("tokens", f"{count(report.tokens)}: {plural(report.steps, 'step')} of {count(report.tokens_per_step)}"),
        ("data", _data(report)),
        ("weights", size(report.weights)),
        ("gradients", size(report.gradients)),
        ("optimizer", size(report.optimizer_state)),
        ("activations", size(report.activations)),
        ("memory", f"{size(report.memory)} and more"),
        ("compute", f"{report.flops_per_token:.3g} FLOPs a token (6 a parameter outside embeddings)"),
    ]
    how = Text("\n" + HOW.format(plural(report.part, "window")), style="dim")
    return Group(*header("Nothing was run or written", facts), how)


def _processes(number: int) -> str:
    return "" if number == 1 else f", {number} processes"


def _data(report: Estimate) -> str:
    if report.training_tokens is None or report.epochs is None:
        return "tokens are not counted yet"
    return f"{count(report.training_tokens)} tokens for training, read {report.epochs:.2g} times"
