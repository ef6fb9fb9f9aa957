"""Answers to the page's questions: what is chosen, as JSON, without the charts that the page shows already."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import orjson

from flows.monitor.offers import address_of, choice_of, offers
from flows.monitor.plain_json import plain_json
from flows.monitor.reader import Reader
from flows.monitor.views import TAB_NAMES, view

__all__ = ["Answers"]

REMEMBERED = 64  # versions of a tab, over all pages


class Answers:
    """Answers for any number of open pages; thread-safe.

    A page names the version of a tab that it has drawn. Of that version the digests of its charts are remembered, and a
    chart that has not changed since is sent as {"id", "same"}; a version that is no longer remembered gets everything.
    """

    def __init__(self, reader: Reader, run: str = "") -> None:
        """`run`: id of the run that is shown where none is named; "" = the newest."""
        self._reader, self._run = reader, run
        self._sent: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, named: Mapping[str, str]) -> bytes:
        """JSON of `views.view` with the page's address and the fingerprint of what its lists offer.

        Args:
            named: what is chosen (`offers.choice_of`), `tab`, and `seen`: the version that the page has drawn. Blocks
                are left out where that is the present one.
        """
        tab = named.get("tab", "")
        tab = tab if tab in TAB_NAMES else TAB_NAMES[0]
        with self._reader.lock:
            choice = choice_of(self._reader, named, self._run)
            found = view(self._reader, choice, tab)
            listed = offers(self._reader, choice)
        found |= {"address": address_of(choice), "offers": listed.fingerprint}
        seen = named.get("seen", "")
        if seen == found["version"]:
            del found["blocks"]
        else:
            found["blocks"] = self._reduced(found["blocks"], found["version"], seen)
        return plain_json(found)

    def _reduced(self, blocks: list[dict[str, Any]], version: str, seen: str) -> list[dict[str, Any]]:
        with self._lock:
            known = self._sent.get(seen, {})
            kept: dict[str, bytes] = {}
            reduced = [self._block(block, known, kept) for block in blocks]
            self._sent[version] = kept
            self._sent.move_to_end(version)
            while len(self._sent) > REMEMBERED:
                self._sent.popitem(last=False)
        return reduced

    def _block(self, block: dict[str, Any], known: Mapping[str, bytes], kept: dict[str, bytes]) -> dict[str, Any]:
        if block["kind"] != "charts":
            return block
        charts: list[Any] = []
        for chart in block["charts"]:
            text, name = plain_json(chart), f"{block['id']} {chart['id']}"
            kept[name] = hashlib.blake2b(text, digest_size=12).digest()
            same = known.get(name) == kept[name]
            charts.append({"id": chart["id"], "same": True} if same else orjson.Fragment(text))
        return block | {"charts": charts}
