"""The rooms, in the order in which they are walked through."""

from __future__ import annotations

from gaugekit.lab.room import Room
from gaugekit.lab.rooms.sphere import SPHERE

ROOMS: dict[str, Room] = {room.name: room for room in (SPHERE,)}
