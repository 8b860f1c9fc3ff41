"""The barrier between two models on a text: as they are, modulo permutations, and modulo all symmetries.

    python examples/barriers.py A B --text FILE [--observable similarities] [--refine STEPS]

A and B are checkpoints of one architecture; the text is read by A's tokenizer. B is moved along its orbit to A in each
way, and the loss (of an encoder, how far its last states depart from those of both ends) is measured on the straight
line between the two.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

import gaugekit

WAYS: dict[str, dict[str, Any]] = {
    "permutations": {"allowed": "permutations"},
    "all symmetries": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--observable", default=None)
    parser.add_argument("--refine", type=int, default=0, metavar="STEPS")
    parser.add_argument("--points", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    ways = WAYS | ({"learned": {"text": options.text, "refine": options.refine}} if options.refine else {})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("as they are", *ways):
            moved, distance = options.second, None
            if name in ways:
                moved = Path(folder, name.replace(" ", "-"))
                report = gaugekit.align(
                    options.first, options.second, moved, observable=options.observable, **ways[name]
                )
                distance = report.after
                before = report.before
                rows[0]["distance"] = before
            recipe = Path(folder, "recipe.yaml")
            models = [{"model": str(path.absolute()), "parameters": {"weight": 0.5}} for path in (options.first, moved)]
            recipe.write_text(yaml.safe_dump({"merge_method": "linear", "models": models, "align": "none"}))
            merged = gaugekit.merge(
                recipe, Path(folder, f"merge {len(rows)}"), text=options.text, points=options.points
            )
            assert merged.ways is not None
            measured = {"measure": merged.ways.measure, "tokens": merged.ways.tokens}
            rows.append({"way": name, "distance": distance, "barrier": merged.ways.barrier_naive})
    if options.json:
        print(json.dumps(measured | {"rows": rows}))
        return
    table = Table(title=f"{options.first.name} and {options.second.name}: {measured['measure']}")
    for column in ("way", "distance", "barrier"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["way"], f"{row['distance']:.3f}", f"{row['barrier']:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
