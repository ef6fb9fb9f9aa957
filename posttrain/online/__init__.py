"""Online learning as processes: the update worker beside a server, and replays of a recorded buffer."""
