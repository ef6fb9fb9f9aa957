"""On one GPU: SFT, GRPO and rollouts of Qwen3-0.6B's shape in bfloat16, against device limits and peers.

    python tests/benchmarks/gpu.py --output DIR [--minutes 13] [--parts smoke,sft] [--device cpu --size tiny]

Random weights and rows, made from a seed: nothing is downloaded. Each part has a time limit of its own, and its failure
ends no other part. The first one, `smoke`, runs a tiny model through everything, so that a name that is wrong costs
seconds. DIR/gpu.json and DIR/gpu.md are written after every part.

The device's limits are measured first: the rate of a large bfloat16 product, and that of copying memory. MFU is of the
update, as `perf/mfu` of every run: of the maker's figure where the device is known, else of the rate measured here. A
rollout step has to read every weight once, and the keys and values of what went before: "of the bound" is how much of
the measured rate that makes. Every step has rows of other lengths. The first step, which chooses kernels and fills
pools, is a figure of its own. `generate` of transformers runs on the same model and prompts, after our engine is freed;
TRL's SFT trainer on the same rows, where this Python has TRL.

`--vllm PYTHON` runs GRPO with rollouts from vLLM instead, in the environment of that Python (see gpu_vllm.py).

`--device cpu --size tiny` shows that the command works, and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import statistics
import sys
import tempfile
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import gpu_checks
import gpu_vllm
import numpy as np
import torch
import transformers
from speed import inputs
from speed.episodes import Scripted
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.inference.engine import create_rollout_backend
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import PolicySettings, SamplingSettings, SFTSettings
from rl_core.timing import collect_seconds
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.performance_metrics import compute_throughput_metrics, find_peak_flops

SHAPES = {
    "qwen3_06b": dict(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "tiny": dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=512,
        tie_word_embeddings=True,
    ),
}
# rows and tokens of each piece of work
WORK = {
    "qwen3_06b": dict(
        rows=32,
        shortest=512,
        longest=8192,
        micro_batch=16384,
        prompts=16,
        group=8,
        prompt=128,
        completion=1024,
        decode_rows=(1, 64, 256),
        decode_tokens=512,
    ),
    "tiny": dict(
        rows=8,
        shortest=8,
        longest=64,
        micro_batch=256,
        prompts=2,
        group=4,
        prompt=8,
        completion=16,
        decode_rows=(4,),
        decode_tokens=16,
    ),
}
SEED, PAD, FIRST, WARMUP = 0, 0, 8, 2  # ids below FIRST are reserved for special tokens
TRAINING = dict(learning_rate=1e-5, schedule="constant", warmup_steps=0, weight_decay=0.0)
# seconds that each part may take, in the order in which they run
BUDGETS = {
    "smoke": 90,
    "limits": 30,
    "sft": 120,
    "decode": 120,
    "numerics": 60,
    "resume": 60,
    "grpo": 150,
    "reads": 40,
    "profile": 60,
    "backends": 120,
    "generate": 90,
    "trl_sft": 120,
}


class Numbers:
    """A renderer whose text is token ids: no tokenizer of 151,936 tokens is needed."""

    pad_id = PAD

    def prompt_ids(self, messages):
        return [int(word) for word in messages[-1]["content"].split()]

    def observation_ids(self, messages):
        raise AssertionError("episodes of one action have no observations")

    def action_text(self, ids):
        return " ".join(map(str, ids))


class Question(Episode):
    """One prompt, one action."""

    def __init__(self, seed, prompt):
        super().__init__(seed, "numbers")
        self.prompt = " ".join(map(str, prompt))

    def reset(self):
        return [{"role": "user", "content": self.prompt}]

    def act(self, text):
        return Step(terminated=True, answer=text)


class Questions(Environment):
    """Random prompts of one length."""

    name = "numbers"
    levels = ("numbers",)

    def __init__(self, vocabulary, length):
        super().__init__()
        self._vocabulary, self._length = vocabulary, length

    @property
    def tools(self):
        return Toolset()

    def episode(self, seed, level):
        return Question(seed, draw_ids(seed, self._length, self._vocabulary))

    def seeds(self, split):
        return range(100_000)


def reward_differently(trajectories):
    """Reward rollouts differently, so that all of them have an advantage."""
    return [zlib.crc32(trajectory.turns[-1].action.encode()) / 2**32 for trajectory in trajectories]


def draw_ids(seed, count, vocabulary):
    return np.random.default_rng([SEED, seed]).integers(FIRST, vocabulary, count).tolist()


def main():
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    if options.vllm is not None:
        gpu_vllm.run_vllm(bench, options.vllm, options.output.resolve(), sys.modules[__name__])
        return
    results = {"about": bench.about()}
    deadline = time.monotonic() + 60 * options.minutes
    for name in options.parts:
        results[name] = run_part(bench, name, deadline)
        print(json.dumps({name: results[name]}), flush=True)
        (options.output / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.output / "gpu.md").write_text(format_table(results))
    print((options.output / "gpu.md").read_text())


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=SHAPES, default="qwen3_06b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--steps", type=int, default=5, help=f"measured steps, after {WARMUP} to warm up"
    )
    parser.add_argument("--minutes", type=float, default=13.0, help="of all parts together")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(BUDGETS))
    parser.add_argument(
        "--vllm",
        metavar="PYTHON",
        help="of vLLM's environment (deployments/vllm), or own: this one's",
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch sees no GPU here; --device cpu --size tiny shows that the command works"
        )
    for part in options.parts:
        if part not in BUDGETS:
            parser.error(f"'{part}' is none of {', '.join(BUDGETS)}")
    return options


def run_part(bench, name, deadline):
    """Run a part within its time; return its result, or why there is none."""
    seconds = min(BUDGETS[name], deadline - time.monotonic())
    if seconds < 1:
        return {"left_out": "no time was left"}
    began = time.monotonic()
    try:
        with limit_time(seconds):
            run = getattr(bench, name, None) or getattr(gpu_checks, f"measure_{name}")
            result = run() if hasattr(bench, name) else run(bench)
    except Exception as error:
        first_line = str(error).strip().splitlines()[:1]
        result = {"failed": f"{type(error).__name__}: {' '.join(first_line)}"}
        if not isinstance(error, TimeoutError):
            import traceback

            traceback.print_exc()
    result["part_seconds"] = time.monotonic() - began
    bench.free_memory()
    return result


@contextmanager
def limit_time(seconds):
    """Raise TimeoutError in the main thread after so many seconds."""

    def expire(*_):
        raise TimeoutError(f"more than {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class Bench:
    """The pieces of work, on one device."""

    def __init__(self, options):
        self.options = options
        self.device, self.steps = torch.device(options.device), options.steps
        self.shape, self.work = SHAPES[options.size], WORK[options.size]
        self.config = Qwen3Config(
            **self.shape,
            max_position_embeddings=16384,
            pad_token_id=PAD,
            bos_token_id=1,
            eos_token_id=2,
        )
        self.measured_limits = None

    @property
    def on_gpu(self):
        return self.device.type == "cuda"

    def about(self):
        """Return device, versions, model."""
        with torch.device("meta"):
            parameters = sum(p.numel() for p in Qwen3ForCausalLM(self.config).parameters())
        return {
            "device": torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "parameters": parameters,
            "dtype": "bfloat16",
        }

    def smoke(self):
        """Run every part but this one with a tiny model and one step; list those that fail."""
        options = argparse.Namespace(**{**vars(self.options), "size": "tiny", "steps": 1})
        tiny, deadline = Bench(options), time.monotonic() + BUDGETS["smoke"] - 5
        failed = {}
        for name in BUDGETS:
            if name in ("smoke", "limits", "generate", "trl_sft"):
                continue
            result = run_part(tiny, name, deadline)
            if "failed" in result:
                failed[name] = result["failed"]
        return {"failed_parts": failed}

    @property
    def limits_of_device(self):
        """The device's limits, measured once."""
        if self.measured_limits is None:
            self.measured_limits = self.limits()
        return self.measured_limits

    def limits(self):
        """Measure a product and a copy."""
        size, numbers = (8192, 2**30) if self.on_gpu else (256, 2**22)
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        source = torch.ones(numbers, device=self.device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        rate = 2 * size**3 / self._best(lambda: a @ b)
        moved = 2 * 2 * numbers / self._best(lambda: target.copy_(source))
        named = find_peak_flops(torch.cuda.get_device_name(self.device)) if self.on_gpu else None
        limits = {"matrix_flops": rate, "copy_bytes_per_s": moved, "peak_flops": named or rate}
        self.measured_limits = limits
        return dict(limits)

    def decode(self):
        """Measure the engine: rows x completion tokens, none ends before."""
        return {"runs": [self._decode(rows) for rows in self.work["decode_rows"]]}

    def _decode(self, rows):
        new, prompt = self.work["decode_tokens"], self.work["prompt"]
        model = self.model().eval()
        prompts = [draw_ids(index, prompt, self.config.vocab_size) for index in range(rows)]
        engine = create_rollout_backend(model, eos_ids=(), pad_id=PAD, max_length=prompt + new)

        def play():
            sequences = [Scripted(ids, seed, limit=new) for seed, ids in enumerate(prompts)]
            engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=new, slots=rows))
            assert all(sequence.sampled == new for sequence in sequences)

        taken = self.timed(play, steps=min(self.steps, 3))
        bound = new * self.weight_bytes(model) + rows * self.cache_bytes_per_token() * sum(
            prompt + index for index in range(new)
        )
        limit = self.limits_of_device["copy_bytes_per_s"]
        return {
            "rows": rows,
            "tokens_per_s": rows * new / taken["seconds"],
            **taken,
            "of_the_bound": bound / taken["seconds"] / limit,
            "replayed": self.replay_share(engine),
        }

    def weight_bytes(self, model):
        """Bytes of the weights that a step reads, bfloat16: all but an untied embedding."""
        named = model.named_parameters()
        is_tied = self.config.tie_word_embeddings
        return 2 * sum(p.numel() for name, p in named if is_tied or "embed_tokens" not in name)

    def cache_bytes_per_token(self):
        """Bytes of a token's keys and values, bfloat16."""
        config = self.config
        return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def replay_share(self, engine):
        """Return the share of the engine's steps that were replays of a recording; None on a CPU."""
        graphs = engine._decoder.graphs
        return graphs.num_replays / max(1, graphs.num_steps) if graphs is not None else None

    def generate(self):
        """Measure `generate` of transformers on the prompts of `decode`."""
        return {"runs": [self._generate(rows) for rows in self.work["decode_rows"]]}

    def _generate(self, rows):
        new, prompt = self.work["decode_tokens"], self.work["prompt"]
        model = self.model().eval()
        model.generation_config.eos_token_id = None
        ids = torch.tensor(
            [draw_ids(index, prompt, self.config.vocab_size) for index in range(rows)],
            device=self.device,
        )

        def run():
            with torch.no_grad():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=new,
                    pad_token_id=PAD,
                )
            assert out.shape[1] == prompt + new

        taken = self.timed(run, steps=1, warmup=1)
        return {"rows": rows, "tokens_per_s": rows * new / taken["seconds"], **taken}

    def sft(self):
        """Measure optimizer steps on rows of different lengths, all tokens but the first with loss."""
        return self.trained(self.build_sft(), lambda metrics: metrics["train/tokens"])

    def build_sft(self, steps=None, **changes):
        """Build an SFT trainer whose every step has other rows."""
        rows = self.rows(self.work["rows"] * ((steps or self.steps) + WARMUP + 1))
        settings = SFTSettings(
            batch_size=self.work["rows"],
            **{"micro_batch_tokens": self.work["micro_batch"], **TRAINING, **changes},
        )
        examples = [(ids, [False] + [True] * (len(ids) - 1)) for ids in rows]
        return SFTTrainer(self.model(), PAD, examples, [], settings, SEED)

    def grpo(self):
        """Measure full rounds: play, score, update."""
        trainer = self.build_grpo()
        length = self.work["prompt"] + self.work["completion"]
        rows = self.work["prompts"] * self.work["group"]
        result = self.trained(trainer, lambda metrics: length * rows)
        return {**result, "replayed": self.replay_share(trainer.backend)}

    def build_grpo(self):
        settings = PolicySettings(
            algorithm="grpo",
            iterations=self.steps + WARMUP,
            prompts_per_iteration=self.work["prompts"],
            group_size=self.work["group"],
            rewards={"gpu:reward_differently": 1.0},
            micro_batch_tokens=self.work["micro_batch"],
            sampling=SamplingSettings(
                max_completion_tokens=self.work["completion"],
                slots=self.work["prompts"] * self.work["group"],
            ),
            **TRAINING,
        )
        model, length = self.model(), self.work["prompt"] + self.work["completion"]
        return PolicyGradientTrainer(
            model,
            None,
            Numbers(),
            Questions(self.config.vocab_size, self.work["prompt"]),
            settings,
            SEED,
            RewardOrchestrator(settings.rewards),
            create_rollout_backend(model, eos_ids=(), pad_id=PAD, max_length=length),
        )

    def trl_sft(self):
        """Measure TRL's trainer on the same rows in bfloat16, or return why not."""
        try:
            import datasets
            import trl
        except ImportError as error:
            return {"left_out": f"this Python has no {error.name}"}
        rows, seconds = self.rows(self.work["rows"] * (self.steps + WARMUP)), []
        data = datasets.Dataset.from_list([{"input_ids": ids} for ids in rows])
        bench = self

        class Clock(transformers.TrainerCallback):
            def on_step_begin(self, *_, **__):
                self.started_at = bench.now()

            def on_step_end(self, *_, **__):
                seconds.append(bench.now() - self.started_at)

        self.free_memory()
        # micro-batches of about as many padded tokens as ours have at most
        size = max(1, self.work["micro_batch"] // self.work["longest"])
        with tempfile.TemporaryDirectory() as output:
            args = trl.SFTConfig(
                output_dir=output,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=-(-self.work["rows"] // size),
                max_steps=self.steps + WARMUP,
                learning_rate=TRAINING["learning_rate"],
                lr_scheduler_type="constant",
                bf16=self.on_gpu,
                use_cpu=not self.on_gpu,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                max_length=self.work["longest"],
                disable_tqdm=True,
            )
            # as TRL recommends: float32 weights, bfloat16 by autocast
            model = self.model().float() if self.on_gpu else self.model()
            trainer = trl.SFTTrainer(
                model=model,
                args=args,
                train_dataset=data,
                callbacks=[Clock()],
                processing_class=inputs.make_tokenizer(self.config.vocab_size),
            )
            trainer.train()
        taken = seconds[WARMUP:]
        return {
            "tokens_per_s": sum(map(len, rows)) / len(seconds) / statistics.median(taken),
            "spread": [min(taken), max(taken)],
            "memory_gb": self.memory(),
            "trl": trl.__version__,
        }

    def rows(self, count):
        """Draw rows of different lengths."""
        work = self.work
        lengths = np.random.default_rng(SEED).integers(work["shortest"], work["longest"] + 1, count)
        return [
            draw_ids(index, length, self.config.vocab_size)
            for index, length in enumerate(lengths.tolist())
        ]

    def trained(self, trainer, tokens_of):
        """Measure steps of a trainer: the first one alone, the median of those after the warm-up."""
        taken, tokens, spans_of, metrics = [], [], [], {}
        self.free_memory()
        for _ in range(self.steps + WARMUP):
            began = self.now()
            with collect_seconds() as spans:
                metrics = trainer.step()
            taken.append(self.now() - began)
            tokens.append(tokens_of(metrics))
            spans_of.append(
                {
                    **spans,
                    **compute_throughput_metrics(spans, trainer.model, is_bfloat16=True),
                    "perf/rollout_seconds": metrics.get("perf/rollout_seconds", 0.0),
                }
            )
        first, taken, tokens, spans_of = (
            taken[0],
            taken[WARMUP:],
            tokens[WARMUP:],
            spans_of[WARMUP:],
        )
        flops = statistics.median(1e12 * spans["perf/update_tflops"] for spans in spans_of)
        return {
            "tokens_per_s": sum(tokens) / sum(taken),
            "first_seconds": first,
            "seconds": statistics.median(taken),
            "spread": [min(taken), max(taken)],
            "mfu": flops / self.limits_of_device["peak_flops"],
            "in_rollouts": sum(spans["perf/rollout_seconds"] for spans in spans_of) / sum(taken),
            "memory_gb": self.memory(),
            "loss": metrics["train/loss"],
        }

    def model(self):
        """Make random weights, the same every time."""
        torch.manual_seed(SEED)
        with self.device:
            return Qwen3ForCausalLM(self.config).to(torch.bfloat16)

    def timed(self, work, steps=None, warmup=WARMUP):
        """Return seconds of the first run, median, lowest and highest of the later ones, and the peak of memory."""
        self.free_memory()
        taken = []
        for _ in range((steps or self.steps) + warmup):
            began = self.now()
            work()
            taken.append(self.now() - began)
        steady = taken[warmup:]
        return {
            "first_seconds": taken[0],
            "seconds": statistics.median(steady),
            "spread": [min(steady), max(steady)],
            "memory_gb": self.memory(),
        }

    def now(self):
        """Return the seconds, once the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def free_memory(self):
        """Free what nothing refers to, so that the next measurement has the device for itself."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self):
        """Return the peak of memory since `free_memory`, in 10^9 bytes."""
        return torch.cuda.max_memory_allocated() / 1e9 if self.on_gpu else None

    def _best(self, work):
        best = float("inf")
        for _ in range(10):
            began = self.now()
            work()
            best = min(best, self.now() - began)
        return best


def format_table(results):
    """Format the results as Markdown."""
    about = results["about"]
    lines = [
        f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, "
        f"{about['parameters'] / 1e6:,.0f}M parameters, {about['dtype']}."
    ]
    limits = results.get("limits", {})
    if "matrix_flops" in limits:
        lines[0] += (
            f" Measured limits: {limits['matrix_flops'] / 1e12:,.1f} TFLOP/s, "
            f"{limits['copy_bytes_per_s'] / 1e9:,.0f} GB/s; MFU is of {limits['peak_flops'] / 1e12:,.1f} TFLOP/s."
        )
    lines += [
        "",
        "| work | tokens/s | peer, tokens/s | MFU | of the bound | replayed | in rollouts | first step, s | peak GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    peers = {run["rows"]: run for run in results.get("generate", {}).get("runs", [])}
    for line in results.get("decode", {}).get("runs", []):
        peer = peers.get(line["rows"])
        lines.append(
            f"| rollouts, {line['rows']} rows | {line['tokens_per_s']:,.0f} "
            f"| {format(peer['tokens_per_s'], ',.0f') + ' (generate)' if peer else '-'} | "
            f"| {line['of_the_bound']:.0%} | {format_share(line['replayed'])} | "
            f"| {line['first_seconds']:.1f} | {format_amount(line['memory_gb'])} |"
        )
    trl = results.get("trl_sft", {})
    for name in ("sft", "grpo"):
        line = results.get(name, {})
        if "tokens_per_s" in line:
            peer = trl if name == "sft" and "tokens_per_s" in trl else None
            peer_speed = f"{peer['tokens_per_s']:,.0f} (TRL {peer['trl']})" if peer else "-"
            lines.append(
                f"| {name} | {line['tokens_per_s']:,.0f} | {peer_speed} | {line['mfu']:.0%} | "
                f"| {format_share(line.get('replayed'))} | {line['in_rollouts']:.0%} "
                f"| {line['first_seconds']:.1f} | {format_amount(line['memory_gb'])} |"
            )
    lines += gpu_checks.format_checks(results)
    for name, result in results.items():
        for key, text in (("left_out", "was left out"), ("failed", "failed")):
            if key in result:
                lines += ["", f"`{name}` {text}: {result[key]}."]
    return "\n".join(lines) + "\n"


def format_amount(gigabytes):
    return "-" if gigabytes is None else f"{gigabytes:.1f}"


def format_share(share):
    return "-" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    main()
