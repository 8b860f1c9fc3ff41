"""The local page on which the geometry can be dragged: rooms, the server, and the page as files."""
