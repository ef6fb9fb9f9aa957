"""Description of the code that float32 runs on this processor: by tiles, by vectors, or torch's kernels alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rl_core.cpu import build, gemm, int8_gemm, packed_vectors

__all__ = ["ProcessorPath", "path_of_this_processor"]


@dataclass(frozen=True, slots=True)
class ProcessorPath:
    """Code of a processor, for people."""

    detail: str
    is_fast: bool = True  # False = something could be done about it, or the slowest code runs
    advice: str = ""


def path_of_this_processor() -> ProcessorPath:
    """The code that runs here; compiles it where that has not been done."""
    code = build.load()
    if code is None:
        if os.environ.get("POSTTRAIN_NATIVE") == "0":
            return ProcessorPath("torch's kernels alone: POSTTRAIN_NATIVE=0 turns compiled code off", False, "unset it")
        return ProcessorPath("torch's kernels alone, the slowest way", False, "install a C compiler (cc, gcc or clang)")
    training = "tiles (AMX)" if gemm.load_tiles() else "vectors" if gemm.load() else "torch's library"
    rollouts = "tiles (AMX)" if int8_gemm.load() else "vectors" if packed_vectors.load() else "torch's library"
    cost = "" if gemm.load_tiles() else "; AMX would be about 1.5 times as fast (docs/benchmarks/speed.md)"
    return ProcessorPath(
        f"compiled for vectors of {code.vector_numbers()} numbers; products in training by {training}, in rollouts by "
        f"{rollouts}{cost}"
    )
