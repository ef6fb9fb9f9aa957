"""Online learning as processes: the supervised update worker and gate of a server, replays of a recorded buffer."""
