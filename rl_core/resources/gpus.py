"""GPUs by name: memory, memory bandwidth and achieved share of the peak, each with its source.

Peaks in dense bfloat16 are `rl_core.training.throughput.peak_flops`. MFU is model FLOPs utilisation in pre-training
with the cited system; post-training of small models or short sequences reaches less. A GPU without a published MFU has
none here: then only the time at the full peak is known, a lower bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_core.errors import SettingsError, nearest
from rl_core.training.throughput import peak_flops

__all__ = ["GPUS", "Gpu", "parse_gpus"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures of one GPU."""

    name: str
    memory_bytes: int  # as the data sheet names it, 10^9 bytes to the GB
    bytes_per_second: float  # peak memory bandwidth
    source: str
    mfu: tuple[float, float] | None = None  # lowest and highest that were published; None = none known
    mfu_source: str = ""

    @property
    def flops_per_second(self) -> float:
        """Dense bfloat16 peak, operations a second."""
        peak = peak_flops(self.name)
        assert peak is not None, self.name
        return peak


# Table 1 of the former: 137 to 163 of 312 TFLOP/s for models of 1.7B to 1T parameters; table 4 of the latter.
_A100 = ((0.44, 0.52), "Narayanan et al. 2021, arXiv:2104.04473, table 1")
_H100 = ((0.38, 0.43), "Llama 3, arXiv:2407.21783, table 4")


def _gpu(
    name: str, memory_gb: int, gb_per_second: int, sheet: str, mfu: tuple[tuple[float, float], str] | None = None
) -> Gpu:
    share, source = mfu or (None, "")
    return Gpu(name, memory_gb * 10**9, gb_per_second * 1e9, f"NVIDIA {sheet} data sheet", share, source)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 80, 2039, "A100 80GB SXM", _A100),
        _gpu("A100 40GB", 40, 1555, "A100 40GB SXM", _A100),
        _gpu("A100 PCIe", 80, 1935, "A100 80GB PCIe"),
        _gpu("H100", 80, 3350, "H100 SXM", _H100),
        _gpu("H100 PCIe", 80, 2000, "H100 PCIe"),
        _gpu("H100 NVL", 94, 3900, "H100 NVL"),
        _gpu("H200", 141, 4800, "H200 SXM"),
        _gpu("B200", 180, 8000, "DGX B200 (an eighth of it)"),
        _gpu("L40S", 48, 864, "L40S"),
        _gpu("L4", 24, 300, "L4"),
        _gpu("A10", 24, 600, "A10"),
    )
}
_KEYS = {name.lower().replace(" ", ""): name for name in GPUS}


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Number and kind of `8xH200`, `H100`, `4xA100-40GB`.

    Raises: SettingsError for a name that is not known, or no such form.
    """
    found = re.fullmatch(r"(?:(\d{1,5})x)?([A-Za-z][A-Za-z0-9 _-]*)", text.strip())
    if found is None or not int(found[1] or 1):
        raise SettingsError(f"--gpus: {text!r} is no number and kind of GPU; write 8xH200, or H100 for one")
    name = _KEYS.get(re.sub(r"[ _-]", "", found[2]).lower())
    if name is None:
        near, everything = nearest(found[2], GPUS), f"known: {', '.join(sorted(GPUS))}"
        raise SettingsError(
            f"--gpus: no GPU {found[2]!r} is known; {near}{'' if near == everything else f' ({everything})'}"
        )
    return int(found[1] or 1), GPUS[name]
