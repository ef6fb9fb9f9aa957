"""Names of the policy-gradient algorithms, and their defaults of clip and aggregation."""

from __future__ import annotations

from typing import Literal

__all__ = ["AGGREGATIONS", "CLIPS", "GROUP_ALGORITHMS", "Aggregation", "Algorithm"]

Algorithm = Literal["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce"]
GROUP_ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo")  # group-relative advantages

# Lower and upper clip of the ratio; others have (0.2, 0.2). Sources: arXiv:2507.18071; arXiv:2503.14476
CLIPS = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
# Others have token_mean. Sources: arXiv:2503.20783; arXiv:2507.18071, eq. 5; arXiv:2511.20347
AGGREGATIONS: dict[str, Aggregation] = {"dr_grpo": "constant", "gspo": "sequence_mean", "sapo": "sequence_mean"}
