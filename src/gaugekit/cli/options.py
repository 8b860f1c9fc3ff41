"""Arguments and options that several commands have, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# As in the verbs, which are not imported for them: they take torch along, and `--help` should not wait for that.
ObservableName = Literal["logprobs", "logits", "hidden", "similarities"]
FloatName = Literal["float16", "bfloat16", "float32", "float64"]

# The backslash keeps rich from taking the brackets for its markup.
WHERE = r"A directory, or a hub id (org/name\[@revision]) in the local cache."

Model = Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=WHERE)]
First = Annotated[str, typer.Argument(metavar="A", show_default=False, help=WHERE)]
Second = Annotated[str, typer.Argument(metavar="B", show_default=False, help="Another one of the same architecture.")]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", show_default=False, help="The directory to write; its parent must exist.")
]
Observable = Annotated[
    ObservableName | None,
    typer.Option(
        "--observable",
        show_default="logprobs, or hidden without a language-model head",
        help="What must not change.",
    ),
]
MaxShardSize = Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest weight file.")]
StoredDtype = Annotated[
    FloatName | None,
    typer.Option("--dtype", show_default="each keeps its own", help="Write every tensor of floats in this dtype."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a checkpoint.")]
Revision = Annotated[str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a hub id.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", metavar="PATH", show_default="MODEL's own", help="A directory, tokenizer.json or .gguf file."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="PAGE", help="Also write a self-contained page with plots.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
