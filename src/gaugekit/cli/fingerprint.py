"""`gaugekit fingerprint`: a signature of a checkpoint that no symmetry changes."""

from __future__ import annotations

from gaugekit.cli.common import emit_json, progress, reporting_errors
from gaugekit.cli.options import Debug, Model, Observable, Revision


def fingerprint(model: Model, observable: Observable = None, revision: Revision = None, debug: Debug = False) -> None:
    """Print a signature of MODEL as JSON, below 100 kB: `gaugekit fingerprint MODEL > print.json`.

    compare takes it in place of the model, so that descent can be checked without shipping weights. It holds the
    spectra of every head's circuits, which no re-basing, permutation, rotation or scaling of the model changes.
    """
    with reporting_errors(debug):
        from gaugekit.verbs.fingerprint import fingerprint as verb

        with progress() as track:
            report = verb(model, observable=observable, revision=revision, track=track)
        emit_json(report.to_dict())
