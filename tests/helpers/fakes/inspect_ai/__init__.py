"""Stand-in for inspect-ai: its command `eval`, with a log as it writes one. See `__main__.py`."""

__version__ = "0.3-stand-in"
