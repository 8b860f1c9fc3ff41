"""The rooms, in the order in which they are walked through."""

from __future__ import annotations

from gaugekit.lab.room import Room
from gaugekit.lab.rooms.fingerprint import FINGERPRINT
from gaugekit.lab.rooms.forgotten import FORGOTTEN
from gaugekit.lab.rooms.frame import FRAME
from gaugekit.lab.rooms.head import HEAD
from gaugekit.lab.rooms.keys import KEYS
from gaugekit.lab.rooms.ruler import RULER
from gaugekit.lab.rooms.shock import SHOCK
from gaugekit.lab.rooms.sphere import SPHERE
from gaugekit.lab.rooms.steps import STEPS
from gaugekit.lab.rooms.tangent import TANGENT

ROOMS: dict[str, Room] = {
    room.name: room for room in (RULER, SPHERE, SHOCK, FORGOTTEN, TANGENT, KEYS, FINGERPRINT, STEPS, FRAME, HEAD)
}
