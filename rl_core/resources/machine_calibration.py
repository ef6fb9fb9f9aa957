"""Measurement of this machine's speeds and of a process's own memory, in about a minute.

Every speed is taken several times, all of them in turn, so that a neighbour's load spreads over them; small models of
the widths in `SHAPES` stand for those that are planned.
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

from rl_core.cpu import kernels, packed_vectors
from rl_core.cpu.int8_gemm import load as int8_products
from rl_core.errors import BackendError
from rl_core.inference.engine import make_backend
from rl_core.machine_memory import machine_memory
from rl_core.models import lora
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import completion_logprobs
from rl_core.resources.activations import MicroBatch, of_packed_forward, of_transformers
from rl_core.resources.model_shape import ModelShape, shape_of
from rl_core.resources.stage_work import decoding_work, scoring_work, training_work
from rl_core.rollouts.batching import TrainRow, make_batches
from rl_core.settings import LoraSettings, SamplingSettings, SFTSettings
from rl_core.settings.machine import MachineSettings, MeasuredSpeed, ProductSpeed
from rl_core.trainers.sft import SFTTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["calibrate", "process_bytes", "train_and_sample"]

# hidden, layers, heads, key/value heads, inner: 0.7M to 12M parameters
SHAPES = ((128, 4, 4, 2, 344), (256, 4, 4, 2, 688), (512, 4, 8, 4, 1376), (1024, 1, 16, 8, 2752))
NANO = (64, 2, 4, 2, 96)  # heads of 16 dimensions, as compiled code needs
VOCABULARY, ROWS, LENGTH = 512, 32, 64  # of a training step: 2048 tokens
SLOTS, PROMPT, NEW = 64, 8, 24  # of a decoding run
FEW = 4  # sequences of the run whose difference to `SLOTS` gives the cost of a sequence
HEAP_SHAPE, HEAP_ROWS, HEAP_STEPS = (256, 4, 4, 2, 688), 64, 3
COPIED = 2**26  # float32 values of the copy: 256 MiB, which no cache holds
PRODUCT_ROWS, PRODUCT_SIZES = 1024, (128, 256, 512, 1024)
REPEATS = 3
PROCESS_SECONDS = 300.0  # of a process that measures memory

_ONE_STEP = "from rl_core.resources.machine_calibration import train_and_sample as work; work()"
_HEAP = "from rl_core.resources.machine_calibration import train_for_heap as work; work({recomputed}, {adapters})"
_PEAK = "; from rl_core.machine_memory import peak_resident_bytes as peak; print(peak())"


Clock = Callable[[], float]


def calibrate(
    name: str, *, pipeline_imports: Sequence[str] = (), repeats: int = REPEATS, clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> MachineSettings:  # fmt: skip
    """Speeds of this machine with torch's present number of threads.

    Args:
        name: of the processor, for people.
        pipeline_imports: modules that a pipeline's process has beside rl_core.
        clock: of seconds; with one thread, processor time leaves other work on the machine out.
        progress: told what is measured next.
    Raises: BackendError where a process that measures memory fails.
    """
    progress("memory of processes")
    library = process_bytes()
    pipeline = process_bytes(pipeline_imports) - library if pipeline_imports else 0
    packed, recomputed = _heap_share(library), _heap_share(library, recomputed=True)
    adapted = _heap_share(library, adapters=True)
    progress("memory's speed")
    copy, read = _memory_speeds(repeats, clock)
    models = [(shape, _model(shape)) for shape in SHAPES]
    sizes = [shape_of(model, LENGTH) for _, model in models]
    step, row = _decode_overhead(repeats, clock)
    training = [_training(model) for _, model in models]
    scoring = [_scoring(model) for _, model in models]
    decoding = [_decoding(model, SLOTS) for _, model in models]
    seconds = _in_turn([*training, *scoring, *decoding], repeats, clock, progress)
    progress("products of matrices")
    count = len(models)
    found: dict[str, Any] = {
        "training": [_training_speeds(*pair, copy) for pair in zip(sizes, seconds[:count], strict=True)],
        "scoring": [_scoring_speeds(*pair) for pair in zip(sizes, seconds[count : 2 * count], strict=True)],
        "decoding": [_decoding_speeds(*pair, step, row) for pair in zip(sizes, seconds[2 * count :], strict=True)],
    }
    return MachineSettings(
        name=name, threads=torch.get_num_threads(), memory_bytes=machine_memory(), library_bytes=library,
        pipeline_bytes=max(0, pipeline), heap_share=packed, heap_share_recomputed=recomputed,
        heap_share_adapters=adapted, packed_weight_bytes=_packed_weight_bytes(), decode_step_seconds=step,
        decode_row_seconds=row, copy_bytes_per_second=copy, read_bytes_per_second=read,
        products=_products(repeats, clock),
        **{kind: tuple(speeds) for kind, speeds in found.items()},
    )  # fmt: skip


# -- memory ------------------------------------------------------------------------------------------------------------


def process_bytes(imports: Sequence[str] = ()) -> int:
    """Peak resident memory of a fresh process that trains and samples from a tiny model, with further imports.

    Raises: BackendError where it fails.
    """
    return _peak_of("".join(f"import {name}; " for name in imports) + _ONE_STEP)


def _peak_of(code: str) -> int:
    """Peak resident memory of a process that runs this code."""
    code += _PEAK
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=PROCESS_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"a process that measures memory took longer than {PROCESS_SECONDS:g} s; try again with less beside it"
        ) from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise BackendError(f"a process that measures memory failed: {reason[0]}")
    return int(done.stdout.strip().splitlines()[-1])


def train_for_heap(recomputed: bool, adapters: bool) -> None:
    """Steps of a model of 3M parameters, whose activations are larger than anything else."""
    model: Any = _model(HEAP_SHAPE)
    if adapters:
        model = lora.add_adapter(model, LoraSettings())
    step = _training(model, rows=HEAP_ROWS, recomputed=recomputed)
    for _ in range(HEAP_STEPS):
        step()


def _heap_share(library: int, *, recomputed: bool = False, adapters: bool = False) -> float:
    """Peak of a fresh process beyond what is live in it, as a share of its activations."""
    model: Any = _model(HEAP_SHAPE)
    shape = shape_of(model, LENGTH)
    tokens = HEAP_ROWS * LENGTH
    batch = MicroBatch(tokens, tokens, HEAP_ROWS * (LENGTH - 1))
    live = of_packed_forward(shape, batch)
    if recomputed:
        model = model.to("meta")
        live = of_transformers(model, shape, batch, device="cpu", autocast=False, checkpointing=True)
    held = (4 if adapters else 12) * shape.parameters  # weights, and the moments of what is trained
    beyond = (
        _peak_of(_HEAP.format(recomputed=recomputed, adapters=adapters)) - library - held - live.kept - live.temporary
    )
    return max(0.0, beyond / (live.kept + live.temporary))


def train_and_sample() -> None:
    """One optimizer step and a few sampled tokens of a tiny model: loads what every stage loads."""
    model = _model(NANO)
    _training(model)()
    _decoding(model, FEW)()


# -- work that is timed ------------------------------------------------------------------------------------------------


class _OneTurn:
    """One turn of sampled tokens, up to the limit."""

    def __init__(self, seed: int) -> None:
        self.prompt_ids = [3 + seed % 8, *range(4, 3 + PROMPT)]
        self.seed = seed

    def advance(self, action_ids: list[int], logprobs: list[float], hit_limit: bool) -> None:
        """Ends."""

    def should_stop(self, action_ids: list[int]) -> bool:
        return False


def _model(shape: tuple[int, int, int, int, int]) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, inner = shape
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=inner, vocab_size=VOCABULARY, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float()


def _rows(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator).tolist()


def _training(model: PreTrainedModel, rows: int | None = None, *, recomputed: bool = False) -> Callable[[], object]:
    rows = ROWS if rows is None else rows
    data = [(row, [False] + [True] * (LENGTH - 1)) for row in _rows(rows)]
    settings = SFTSettings(batch_size=rows, epochs=1000, learning_rate=1e-5, activation_checkpointing=recomputed)
    return SFTTrainer(model, 0, data, [], settings, 0).step


def _scoring(model: PreTrainedModel) -> Callable[[], object]:
    rows = [TrainRow(row[:1], row[1:], [True] * (LENGTH - 1)) for row in _rows(ROWS)]
    (batch,) = make_batches(rows, ROWS * LENGTH, 0)

    def score() -> None:
        with evaluating(model), torch.no_grad():
            completion_logprobs(model, batch)

    return score


def _decoding(model: PreTrainedModel, slots: int) -> Callable[[], object]:
    engine = make_backend(model, eos_ids=(), pad_id=0, max_length=PROMPT + NEW)
    sampling = SamplingSettings(max_completion_tokens=NEW, slots=slots)
    return lambda: engine.run([_OneTurn(seed) for seed in range(slots)], sampling)


def _in_turn(
    works: Sequence[Callable[[], object]], repeats: int, clock: Clock,
    progress: Callable[[str], None] = lambda text: None,
) -> list[list[float]]:  # fmt: skip
    """Seconds of every repeat of each; a first call of each is left out."""
    found: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats + 1):
        progress(f"speeds of models, round {repeat + 1} of {repeats + 1}")
        for work, seconds in zip(works, found, strict=True):
            began = clock()
            work()
            if repeat:
                seconds.append(clock() - began)
    return found


# -- speeds ------------------------------------------------------------------------------------------------------------


def _speeds(hidden: int, flops: float, seconds: Sequence[float]) -> MeasuredSpeed:
    speeds = sorted(flops / spent for spent in seconds)
    return MeasuredSpeed(
        hidden_size=hidden, median=statistics.median(speeds), slowest=speeds[0], fastest=speeds[-1]
    )  # fmt: skip


def _training_speeds(shape: ModelShape, seconds: Sequence[float], copy: float) -> MeasuredSpeed:
    work = training_work(
        shape, SFTSettings(), rows=ROWS, length=LENGTH, loss_length=LENGTH - 1, updates=1, micro_batches=1
    )
    traffic = work.traffic_bytes / copy
    return _speeds(shape.hidden, work.training_flops, [max(spent / 2, spent - traffic) for spent in seconds])


def _scoring_speeds(shape: ModelShape, seconds: Sequence[float]) -> MeasuredSpeed:
    work = scoring_work(shape, rows=ROWS, length=LENGTH, loss_length=LENGTH - 1)
    return _speeds(shape.hidden, work.scoring_flops, seconds)


def _decoding_speeds(shape: ModelShape, seconds: Sequence[float], step: float, row: float) -> MeasuredSpeed:
    work = decoding_work(shape, sequences=SLOTS, prompts=0, prompt_length=PROMPT, new_tokens=NEW, slots=SLOTS, item=4.0)
    fixed = work.decode_steps * step + work.decode_rows * row
    return _speeds(shape.hidden, work.decoding_flops, [max(spent / 4, spent - fixed) for spent in seconds])


def _decode_overhead(repeats: int, clock: Clock) -> tuple[float, float]:
    """Seconds of a step and of a sequence in it, from runs of few and of many sequences of a tiny model."""
    model = _model(NANO)
    few, many = (
        statistics.median(seconds) / NEW
        for seconds in _in_turn([_decoding(model, slots) for slots in (FEW, SLOTS)], repeats, clock)
    )
    row = max(0.0, (many - few) / (SLOTS - FEW))
    return max(0.0, few - FEW * row), row


def _memory_speeds(repeats: int, clock: Clock) -> tuple[float, float]:
    """Bytes a second of copying, both directions counted, and of reading."""
    source, target = torch.ones(COPIED), torch.zeros(COPIED)
    copying, reading = _in_turn([lambda: target.copy_(source), source.sum], repeats, clock)
    return 8 * COPIED / statistics.median(copying), 4 * COPIED / statistics.median(reading)


def _products(repeats: int, clock: Clock) -> tuple[ProductSpeed, ...]:
    def product(size: int) -> Callable[[], object]:
        left, right = torch.ones(PRODUCT_ROWS, size), torch.ones(size, size)
        return lambda: kernels.linear(left, [right])

    seconds = _in_turn([product(size) for size in PRODUCT_SIZES], repeats, clock)
    return tuple(
        ProductSpeed(rows=PRODUCT_ROWS, size=size, median=2 * PRODUCT_ROWS * size**2 / statistics.median(spent))
        for size, spent in zip(PRODUCT_SIZES, seconds, strict=True)
    )


def _packed_weight_bytes() -> float:
    """Bytes of a weight in the layout of rollouts, of a matrix of 1024 x 1024."""
    products = int8_products() or packed_vectors.load()
    return 4.0 if products is None else products.size(1024, 1024) / 2**20
