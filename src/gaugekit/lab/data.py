"""What the page is built with: parameters, bounds and fixed data of all rooms, as a JSON file of the front end.

python -m gaugekit.lab.data > web/src/data.json
"""

from __future__ import annotations

import json

from gaugekit.lab.rooms import ROOMS


def document() -> str:
    return json.dumps({name: room.document() for name, room in ROOMS.items()}, indent=1) + "\n"


if __name__ == "__main__":
    print(document(), end="")
