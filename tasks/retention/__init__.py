"""Garbage collection: reachability graph and deletion plan."""
