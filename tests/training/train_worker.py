"""What test_distributed.py runs under torchrun.

torchrun --nproc-per-node=2 train_worker.py runs FOLDER      every run that FOLDER/runs.json asks for: {name: words}
torchrun --nproc-per-node=2 train_worker.py alone            process 1 fails, and process 0 does not
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from two import leave

from gaugekit.cli.common import reporting_errors
from gaugekit.cli.train import _ended_by_torchrun, _one_voice
from gaugekit.errors import DataError
from gaugekit.training import distributed


def runs(folder: Path) -> None:
    from gaugekit.training.reading import read
    from gaugekit.training.train import train

    warnings.simplefilter("error", UserWarning)  # FSDP2 warns of what would train wrongly
    for name, words in json.loads((folder / "runs.json").read_text()).items():
        report = train(read(None, words), folder / name)
        (folder / f"{name}-{distributed.rank()}.json").write_text(json.dumps(report.to_dict()))


def main() -> None:
    with _ended_by_torchrun(), reporting_errors(debug=False):
        member = distributed.join()
        assert member is not None
        with _one_voice(member):
            if sys.argv[1] == "runs":
                runs(Path(sys.argv[2]))
                leave()
            if member.rank == 1:
                raise DataError("the disk of process 1 has gone")
            distributed.wait()


if __name__ == "__main__":
    main()
