"""Life of a model version: data lineage, approval, champion, retraining, dead runs.

Garbage collection: reachability graph and deletion plan.
"""

from __future__ import annotations
