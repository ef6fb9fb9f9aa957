"""Measurement of this machine's speeds and of a process's memory, in about a minute.

Every speed is measured several times in rounds, so that other load on the machine affects all of them. Small models of
the widths in `SHAPES` represent the planned ones.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl_core.cpu import gemm, layer_kernels, packed_gemm
from rl_core.errors import BackendError
from rl_core.inference.engine import create_rollout_backend
from rl_core.machine_memory import measure_machine_memory
from rl_core.models import lora
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.forward_modes import enable_autocast, has_bfloat16_kernels
from rl_core.models.logprobs import completion_logprobs
from rl_core.resources.activations import (
    MicroBatch,
    estimate_packed_activations,
)
from rl_core.resources.model_shape import ModelShape, measure_model_shape
from rl_core.resources.stage_time import (
    estimate_decoding_work,
    estimate_scoring_work,
    estimate_training_work,
)
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings, SamplingSettings, SFTSettings
from rl_core.settings.planning import (
    SPEED_NAMES,
    MachineSettings,
    MeasuredSpeed,
    ProductSpeed,
)
from rl_core.trainers.sft import SFTTrainer
from rl_core.types import AutocastPrecision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Clock = Callable[[], float]

# Hidden size, layers, heads, key/value heads, width of the MLP: 0.7M to 12M parameters.
SHAPES = ((128, 4, 4, 2, 344), (256, 4, 4, 2, 688), (512, 4, 8, 4, 1376), (1024, 1, 16, 8, 2752))
TINY_SHAPE = (64, 2, 4, 2, 96)  # heads of 16 dimensions, required by compiled code
VOCABULARY = 512
ROWS = 32  # of a training step
LENGTH = 64  # tokens of a row
SLOTS = 64  # sequences of a decoding run
FEW_SLOTS = 4  # of a second run; the difference gives the cost of a sequence
PROMPT_TOKENS = 8
NEW_TOKENS = 24
HEAP_SHAPE = (256, 4, 4, 2, 688)
HEAP_ROWS = 64
HEAP_STEPS = 3
NUM_COPIED_VALUES = 2**26  # float32: 256 MiB, larger than any cache
PRODUCT_ROWS = 1024
PRODUCT_SIZES = (128, 256, 512, 1024)
REPEATS = 3
PROCESS_SECONDS = 300.0  # limit of a process that measures memory

_MODULE = "rl_core.resources.machine_calibration"
_ONE_STEP_CODE = f"from {_MODULE} import train_and_sample; train_and_sample()"
_HEAP_CODE = f"from {_MODULE} import train_for_heap; train_for_heap({{recomputed}}, {{adapters}})"
_PEAK_CODE = (
    "; from rl_core.machine_memory import measure_peak_resident_bytes as peak; print(peak())"
)


def calibrate_machine(
    name: str,
    *,
    pipeline_imports: Sequence[str] = (),
    repeats: int = REPEATS,
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> MachineSettings:
    """Measure the speeds of this machine with torch's current number of threads.

    Args:
        name: of the processor, for people.
        pipeline_imports: modules of a pipeline's process in addition to rl_core.
        clock: in seconds; with one thread, processor time excludes other work on the machine.
        progress: called with the next measurement.
    Raises: BackendError if a process that measures memory fails.
    """
    progress("memory of processes")
    library = measure_process_bytes()
    pipeline = measure_process_bytes(pipeline_imports) - library if pipeline_imports else 0
    packed = _measure_heap_share(library)
    recomputed = _measure_heap_share(library, recomputed=True)
    adapted = _measure_heap_share(library, adapters=True)
    progress("speed of memory")
    copy, read = _measure_memory_speeds(repeats, clock)
    models = [(shape, _build_model(shape)) for shape in SHAPES]
    sizes = [measure_model_shape(model, LENGTH) for _, model in models]
    step, row = _measure_decode_overhead(repeats, clock)
    precisions: list[AutocastPrecision] = ["none"]
    has_products = (
        gemm.load_bf16_gemm() is not None and packed_gemm.load_bf16_products() is not None
    )
    if has_bfloat16_kernels() and has_products:
        precisions.append("bfloat16")
    works = [
        build(model, precision)
        for precision in precisions
        for build in (_build_training_step, _build_scoring_pass, _build_slots_run)
        for _, model in models
    ]
    seconds = _measure_in_rounds(works, repeats, clock, progress)
    progress("products of matrices")
    speeds: dict[str, tuple[MeasuredSpeed, ...]] = {}
    kinds = [(speed, precision) for precision in precisions for speed in SPEED_NAMES]
    count = len(models)
    for index, (speed, precision) in enumerate(kinds):
        pairs = zip(sizes, seconds[index * count : (index + 1) * count], strict=True)
        key = speed if precision == "none" else f"{speed}_{precision}"
        if speed == "training":
            speeds[key] = tuple(_compute_training_speed(*pair, copy) for pair in pairs)
        elif speed == "scoring":
            speeds[key] = tuple(_compute_scoring_speed(*pair) for pair in pairs)
        else:
            speeds[key] = tuple(_compute_decoding_speed(*pair, step, row) for pair in pairs)
    return MachineSettings(
        name=name,
        threads=torch.get_num_threads(),
        memory_bytes=measure_machine_memory(),
        library_bytes=library,
        pipeline_bytes=max(0, pipeline),
        heap_share=packed,
        heap_share_recomputed=recomputed,
        heap_share_adapters=adapted,
        packed_weight_bytes=_measure_packed_weight_bytes(),
        decode_step_seconds=step,
        decode_row_seconds=row,
        copy_bytes_per_second=copy,
        read_bytes_per_second=read,
        products=_measure_product_speeds(repeats, clock),
        **speeds,
    )


def measure_process_bytes(imports: Sequence[str] = ()) -> int:
    """Return the peak resident memory of a fresh process that trains and samples from a tiny model.

    Args:
        imports: further modules that it imports.
    Raises: BackendError if it fails.
    """
    return _measure_peak_bytes("".join(f"import {name}; " for name in imports) + _ONE_STEP_CODE)


def _measure_peak_bytes(code: str) -> int:
    """Return the peak resident memory of a process that runs this code."""
    code += _PEAK_CODE
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            timeout=PROCESS_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"a process that measures memory took longer than {PROCESS_SECONDS:g} s; try again on an idle machine"
        ) from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise BackendError(f"a process that measures memory failed: {reason[0]}")
    return int(done.stdout.strip().splitlines()[-1])


def train_for_heap(recomputed: bool, adapters: bool) -> None:
    """Train a model of 3M parameters whose activations are larger than anything else for a few steps."""
    model: Any = _build_model(HEAP_SHAPE)
    if adapters:
        model = lora.add_adapter(model, LoraSettings())
    step = _build_training_step(model, rows=HEAP_ROWS, recomputed=recomputed)
    for _ in range(HEAP_STEPS):
        step()


def _measure_heap_share(library: int, *, recomputed: bool = False, adapters: bool = False) -> float:
    """Return the peak of a fresh process beyond its live bytes, as a share of its activations."""
    model: Any = _build_model(HEAP_SHAPE)
    shape = measure_model_shape(model, LENGTH)
    tokens = HEAP_ROWS * LENGTH
    batch = MicroBatch(tokens, tokens, HEAP_ROWS * (LENGTH - 1))
    activations = estimate_packed_activations(shape, batch, checkpointing=recomputed)
    state_bytes = (4 if adapters else 12) * shape.parameters  # weights, and moments of trained ones
    peak = _measure_peak_bytes(_HEAP_CODE.format(recomputed=recomputed, adapters=adapters))
    live = activations.saved + activations.temporary
    extra = peak - library - state_bytes - live
    return max(0.0, extra / live)


def train_and_sample() -> None:
    """Run one optimizer step and sample a few tokens of a tiny model, which loads what every stage loads."""
    model = _build_model(TINY_SHAPE)
    _build_training_step(model)()
    _build_decoding_run(model, FEW_SLOTS)()


class _SingleTurnEpisode:
    """Episode of one turn of sampled tokens, up to the limit."""

    def __init__(self, seed: int) -> None:
        self.prompt_ids = [3 + seed % 8, *range(4, 3 + PROMPT_TOKENS)]
        self.seed = seed

    def take_action(self, action_ids: list[int], logprobs: list[float], hit_limit: bool) -> None:
        """Do nothing: the episode ends."""

    def should_stop(self, action_ids: list[int]) -> bool:
        return False


def _build_model(shape: tuple[int, int, int, int, int]) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, inner = shape
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float()


def _generate_rows(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator).tolist()


def _build_training_step(
    model: PreTrainedModel,
    autocast: AutocastPrecision = "none",
    *,
    rows: int | None = None,
    recomputed: bool = False,
) -> Callable[[], object]:
    rows = ROWS if rows is None else rows
    data = [(row, [False] + [True] * (LENGTH - 1)) for row in _generate_rows(rows)]
    settings = SFTSettings(
        batch_size=rows,
        epochs=1000,
        learning_rate=1e-5,
        activation_checkpointing=recomputed,
        autocast=autocast,
    )
    return SFTTrainer(model, 0, data, [], settings, 0).step


def _build_scoring_pass(
    model: PreTrainedModel, autocast: AutocastPrecision = "none"
) -> Callable[[], object]:
    rows = [TrainRow(row[:1], row[1:], [True] * (LENGTH - 1)) for row in _generate_rows(ROWS)]
    (batch,) = build_batches(rows, ROWS * LENGTH, 0)

    def score() -> None:
        with (
            use_eval_mode(model),
            torch.no_grad(),
            enable_autocast(autocast, torch.device("cpu")),
        ):
            completion_logprobs(model, batch)

    return score


def _build_slots_run(model: PreTrainedModel, autocast: AutocastPrecision) -> Callable[[], object]:
    return _build_decoding_run(model, SLOTS, autocast)


def _build_decoding_run(
    model: PreTrainedModel, slots: int, autocast: AutocastPrecision = "none"
) -> Callable[[], object]:
    engine = create_rollout_backend(
        model, eos_ids=(), pad_id=0, max_length=PROMPT_TOKENS + NEW_TOKENS, autocast=autocast
    )
    sampling = SamplingSettings(max_completion_tokens=NEW_TOKENS, slots=slots)
    return lambda: engine.run_sequences(
        [_SingleTurnEpisode(seed) for seed in range(slots)], sampling
    )


def _measure_in_rounds(
    works: Sequence[Callable[[], object]],
    repeats: int,
    clock: Clock,
    progress: Callable[[str], None] = lambda text: None,
) -> list[list[float]]:
    """Return the seconds of every repeat of each work, without its first call."""
    seconds_by_work: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats + 1):
        progress(f"speeds of models, round {repeat + 1} of {repeats + 1}")
        for work, seconds in zip(works, seconds_by_work, strict=True):
            start = clock()
            work()
            if repeat:
                seconds.append(clock() - start)
    return seconds_by_work


def _compute_speed(hidden: int, flops: float, seconds: Sequence[float]) -> MeasuredSpeed:
    speeds = sorted(flops / duration for duration in seconds)
    return MeasuredSpeed(
        hidden_size=hidden, median=statistics.median(speeds), slowest=speeds[0], fastest=speeds[-1]
    )


def _compute_training_speed(
    shape: ModelShape, seconds: Sequence[float], copy: float
) -> MeasuredSpeed:
    work = estimate_training_work(
        shape,
        SFTSettings(),
        rows=ROWS,
        length=LENGTH,
        loss_length=LENGTH - 1,
        updates=1,
        micro_batches=1,
    )
    traffic = work.traffic_bytes / copy
    return _compute_speed(
        shape.hidden,
        work.training_flops,
        [max(duration / 2, duration - traffic) for duration in seconds],
    )


def _compute_scoring_speed(shape: ModelShape, seconds: Sequence[float]) -> MeasuredSpeed:
    work = estimate_scoring_work(shape, rows=ROWS, length=LENGTH, loss_length=LENGTH - 1)
    return _compute_speed(shape.hidden, work.scoring_flops, seconds)


def _compute_decoding_speed(
    shape: ModelShape, seconds: Sequence[float], step: float, row: float
) -> MeasuredSpeed:
    work = estimate_decoding_work(
        shape,
        sequences=SLOTS,
        prompts=0,
        prompt_length=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        slots=SLOTS,
        item=4.0,
    )
    fixed = work.decode_steps * step + work.decode_rows * row
    return _compute_speed(
        shape.hidden,
        work.decoding_flops,
        [max(duration / 4, duration - fixed) for duration in seconds],
    )


def _measure_decode_overhead(repeats: int, clock: Clock) -> tuple[float, float]:
    """Return the seconds of a step and of a sequence in it, from runs of few and many sequences of a tiny model."""
    model = _build_model(TINY_SHAPE)
    runs = [_build_decoding_run(model, slots) for slots in (FEW_SLOTS, SLOTS)]
    seconds = _measure_in_rounds(runs, repeats, clock)
    few, many = (statistics.median(durations) / NEW_TOKENS for durations in seconds)
    row = max(0.0, (many - few) / (SLOTS - FEW_SLOTS))
    return max(0.0, few - FEW_SLOTS * row), row


def _measure_memory_speeds(repeats: int, clock: Clock) -> tuple[float, float]:
    """Return the bytes per second of copying, counted in both directions, and of reading."""
    source, target = torch.ones(NUM_COPIED_VALUES), torch.zeros(NUM_COPIED_VALUES)
    copying, reading = _measure_in_rounds(
        [lambda: target.copy_(source), source.sum], repeats, clock
    )
    copy_speed = 8 * NUM_COPIED_VALUES / statistics.median(copying)
    read_speed = 4 * NUM_COPIED_VALUES / statistics.median(reading)
    return copy_speed, read_speed


def _measure_product_speeds(repeats: int, clock: Clock) -> tuple[ProductSpeed, ...]:
    def build_product(size: int) -> Callable[[], object]:
        left, right = torch.ones(PRODUCT_ROWS, size), torch.ones(size, size)
        return lambda: layer_kernels.compute_linear(left, [right])

    seconds = _measure_in_rounds([build_product(size) for size in PRODUCT_SIZES], repeats, clock)
    return tuple(
        ProductSpeed(
            rows=PRODUCT_ROWS,
            size=size,
            median=2 * PRODUCT_ROWS * size**2 / statistics.median(durations),
        )
        for size, durations in zip(PRODUCT_SIZES, seconds, strict=True)
    )


def _measure_packed_weight_bytes() -> float:
    """Return the bytes of a weight in the layout of rollouts, of a matrix of 1024 x 1024."""
    products = packed_gemm.load_int8_gemm() or packed_gemm.load_packed_vectors()
    return 4.0 if products is None else products.size(1024, 1024) / 2**20
