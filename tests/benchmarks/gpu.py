"""On one GPU: SFT, GRPO and rollouts of a model of 0.5B parameters in bfloat16, against device limits and peers.

    python tests/benchmarks/gpu.py --output DIR [--steps 5] [--device cpu --size tiny]

Random weights and rows, made from a seed. The device's limits are measured first: the rate of a large bfloat16 product,
and that of reading memory. MFU is of the update, as `perf/mfu` of every run: of the maker's figure where the device is
known, else of the rate measured here. A rollout step has to read every weight once, and the keys and values of what
went before: "of the bound" is how much of the measured reading rate that makes. `generate` of transformers runs on the
same model and prompts; TRL's SFT trainer on the same rows, where this Python has TRL. DIR/gpu.md and DIR/gpu.json.

`--vllm PYTHON` runs GRPO with rollouts from vLLM instead, in the environment of that Python (see gpu_vllm.py).

`--device cpu --size tiny` shows that the command works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import gpu_vllm
import numpy as np
import torch
import transformers
from speed import inputs
from speed.episodes import Scripted
from transformers import LlamaConfig, LlamaForCausalLM

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
    "half_billion": dict(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=65536,
    ),
    "tiny": dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=512,
    ),
}
# rows and tokens of each piece of work
WORK = {
    "half_billion": dict(
        rows=64,
        shortest=64,
        longest=1024,
        micro_batch=32768,
        prompts=16,
        group=8,
        prompt=128,
        completion=256,
        decode_rows=(64, 256),
    ),
    "tiny": dict(
        rows=8,
        shortest=8,
        longest=64,
        micro_batch=1024,
        prompts=2,
        group=4,
        prompt=8,
        completion=16,
        decode_rows=(4,),
    ),
}
SEED, PAD, FIRST, WARMUP = 0, 0, 8, 2  # ids below FIRST are reserved for special tokens
TRAINING = dict(learning_rate=1e-5, schedule="constant", warmup_steps=0, weight_decay=0.0)


class Numbers:
    """A renderer whose text is token ids: no tokenizer of 65,536 tokens is needed."""

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
    results = {"about": bench.about(), "limits": bench.limits}
    for name in options.parts:
        results[name] = getattr(bench, name)()
        print(json.dumps({name: results[name]}), flush=True)
        (options.output / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.output / "gpu.md").write_text(format_table(results))
    print((options.output / "gpu.md").read_text())


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=SHAPES, default="half_billion")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--steps", type=int, default=5, help=f"measured steps, after {WARMUP} to warm up"
    )
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=["decode", "sft", "grpo", "trl_sft"]
    )
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
        if part not in ("decode", "sft", "grpo", "trl_sft"):
            parser.error(f"'{part}' is none of decode, sft, grpo, trl_sft")
    return options


class Bench:
    """The pieces of work, on one device."""

    def __init__(self, options):
        self.device, self.steps = torch.device(options.device), options.steps
        self.shape, self.work = SHAPES[options.size], WORK[options.size]
        self.config = LlamaConfig(
            **self.shape,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=1,
            eos_token_id=2,
        )
        self.limits = self._measure_limits()

    def about(self):
        """Return device, versions, model."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        parameters = sum(parameter.numel() for parameter in self.model().parameters())
        return {
            "device": name,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "parameters": parameters,
            "dtype": "bfloat16",
        }

    def decode(self):
        """Measure the engine against `generate`: rows x completion tokens, none ends before."""
        return [self._decode(rows) for rows in self.work["decode_rows"]]

    def _decode(self, rows):
        new, prompt = self.work["completion"], self.work["prompt"]
        model = self.model().eval()
        model.generation_config.eos_token_id = None
        prompts = [draw_ids(index, prompt, self.config.vocab_size) for index in range(rows)]
        engine = create_rollout_backend(model, eos_ids=(), pad_id=PAD, max_length=prompt + new)

        def ours():
            sequences = [Scripted(ids, seed, limit=new) for seed, ids in enumerate(prompts)]
            engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=new, slots=rows))
            assert all(sequence.sampled == new for sequence in sequences)

        def theirs():
            ids = torch.tensor(prompts, device=self.device)
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

        seconds, spread, memory = self.timed(ours)
        peer, peer_spread, peer_memory = self.timed(theirs, steps=min(self.steps, 3))
        cached = (
            2
            * 2
            * self.shape["num_hidden_layers"]
            * self.shape["num_key_value_heads"]
            * (self.shape["hidden_size"] // self.shape["num_attention_heads"])
        )  # bytes a token, bfloat16
        weights = (
            sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name) * 2
        )
        bound = new * weights + rows * cached * sum(prompt + index for index in range(new))
        return {
            "rows": rows,
            "tokens_per_s": rows * new / seconds,
            "spread": spread,
            "memory_gb": memory,
            "of_the_bound": bound / seconds / self.limits["read_bytes_per_s"],
            "peer_tokens_per_s": rows * new / peer,
            "peer_spread": peer_spread,
            "peer_memory_gb": peer_memory,
        }

    def sft(self):
        """Measure optimizer steps on rows of different lengths, all tokens but the first with loss."""
        rows = self._rows()
        settings = SFTSettings(
            batch_size=self.work["rows"], micro_batch_tokens=self.work["micro_batch"], **TRAINING
        )
        trainer = SFTTrainer(
            self.model(),
            PAD,
            [(ids, [False] + [True] * (len(ids) - 1)) for ids in rows],
            [],
            settings,
            SEED,
        )
        return self._trained(trainer, lambda metrics: metrics["train/tokens"])

    def grpo(self):
        """Measure full rounds: play, score, update."""
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
        trainer = PolicyGradientTrainer(
            model,
            None,
            Numbers(),
            Questions(self.config.vocab_size, self.work["prompt"]),
            settings,
            SEED,
            RewardOrchestrator(settings.rewards),
            create_rollout_backend(model, eos_ids=(), pad_id=PAD, max_length=length),
        )
        return self._trained(
            trainer, lambda metrics: length * self.work["prompts"] * self.work["group"]
        )

    def trl_sft(self):
        """Measure TRL's trainer on the same rows in bfloat16, or return why not."""
        try:
            import datasets
            import trl
        except ImportError as error:
            return {"left_out": f"this Python has no {error.name}"}
        rows, seconds = self._rows(), []
        data = datasets.Dataset.from_list(
            [{"input_ids": ids} for ids in rows] * (self.steps + WARMUP)
        )
        bench = self

        class Clock(transformers.TrainerCallback):
            def on_step_begin(self, *_, **__):
                self.started_at = bench.now()

            def on_step_end(self, *_, **__):
                seconds.append(bench.now() - self.started_at)

        self._reset_memory()
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
                bf16=self.device.type == "cuda",
                use_cpu=self.device.type == "cpu",
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                max_length=self.work["longest"],
                disable_tqdm=True,
            )
            # as TRL recommends: float32 weights, bfloat16 by autocast
            model = self.model().float() if self.device.type == "cuda" else self.model()
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
            "tokens_per_s": sum(map(len, rows)) / statistics.median(taken),
            "spread": [min(taken), max(taken)],
            "memory_gb": self._memory(),
            "trl": trl.__version__,
        }

    def _rows(self):
        work = self.work
        lengths = (
            np.random.default_rng(SEED)
            .integers(work["shortest"], work["longest"] + 1, work["rows"])
            .tolist()
        )
        return [
            draw_ids(index, length, self.config.vocab_size) for index, length in enumerate(lengths)
        ]

    def _trained(self, trainer, tokens_of):
        taken, spans_of, metrics = [], [], {}
        self._reset_memory()
        for _ in range(self.steps + WARMUP):
            began = self.now()
            with collect_seconds() as spans:
                metrics = trainer.step()
            taken.append(self.now() - began)
            spans_of.append(
                {
                    **spans,
                    **compute_throughput_metrics(spans, trainer.model, is_bfloat16=True),
                    "perf/rollout_seconds": metrics.get("perf/rollout_seconds", 0.0),
                }
            )
        taken, spans_of = taken[WARMUP:], spans_of[WARMUP:]
        flops = statistics.median(1e12 * spans["perf/update_tflops"] for spans in spans_of)
        seconds = statistics.median(taken)
        return {
            "tokens_per_s": tokens_of(metrics) / seconds,
            "seconds": seconds,
            "spread": [min(taken), max(taken)],
            "mfu": flops / self.limits["peak_flops"],
            "in_rollouts": sum(spans["perf/rollout_seconds"] for spans in spans_of) / sum(taken),
            "memory_gb": self._memory(),
            "loss": metrics["train/loss"],
        }

    def model(self):
        """Make random weights, the same every time."""
        torch.manual_seed(SEED)
        with self.device:
            return LlamaForCausalLM(self.config).to(torch.bfloat16)

    def timed(self, work, steps=None):
        """Return median seconds, [lowest, highest], and the peak of memory."""
        self._reset_memory()
        taken = []
        for _ in range((steps or self.steps) + WARMUP):
            began = self.now()
            work()
            taken.append(self.now() - began)
        taken = taken[WARMUP:]
        return statistics.median(taken), [min(taken), max(taken)], self._memory()

    def now(self):
        """Return the seconds, once the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _reset_memory(self):
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _memory(self):
        return torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None

    def _measure_limits(self):
        on_gpu = self.device.type == "cuda"
        size, numbers = (8192, 2**31) if on_gpu else (512, 2**24)
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        block = torch.ones(numbers, device=self.device, dtype=torch.bfloat16)
        rate = 2 * size**3 / self._best(lambda: a @ b)
        read = 2 * numbers / self._best(lambda: block.view(torch.int16).max())
        named = find_peak_flops(torch.cuda.get_device_name(self.device)) if on_gpu else None
        return {"matrix_flops": rate, "read_bytes_per_s": read, "peak_flops": named or rate}

    def _best(self, work):
        best = float("inf")
        for _ in range(10):
            began = self.now()
            work()
            best = min(best, self.now() - began)
        return best


def format_table(results):
    """Format the results as Markdown."""
    about, limits = results["about"], results["limits"]
    lines = [
        f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, "
        f"{about['parameters'] / 1e6:,.0f}M parameters, {about['dtype']}. Measured limits: "
        f"{limits['matrix_flops'] / 1e12:,.1f} TFLOP/s, {limits['read_bytes_per_s'] / 1e9:,.0f} GB/s; MFU is of "
        f"{limits['peak_flops'] / 1e12:,.1f} TFLOP/s.",
        "",
        "| work | tokens/s | peer, tokens/s | MFU | of the bound | in rollouts | peak GB: ours, peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in results.get("decode", []):
        lines.append(
            f"| rollouts, {line['rows']} rows | {line['tokens_per_s']:,.0f} "
            f"| {line['peer_tokens_per_s']:,.0f} (generate) "
            f"| | {line['of_the_bound']:.0%} | "
            f"| {format_amount(line['memory_gb'])}, {format_amount(line['peer_memory_gb'])} |"
        )
    trl = results.get("trl_sft", {})
    for name in ("sft", "grpo"):
        if name in results:
            line, peer = results[name], trl if name == "sft" and "tokens_per_s" in trl else None
            peer_speed = f"{peer['tokens_per_s']:,.0f} (TRL {peer['trl']})" if peer else "-"
            lines.append(
                f"| {name} | {line['tokens_per_s']:,.0f} | {peer_speed} "
                f"| {line['mfu']:.0%} | | {line['in_rollouts']:.0%} "
                f"| {format_amount(line['memory_gb'])}, {format_amount(peer['memory_gb'] if peer else None)} |"
            )
    if "left_out" in trl:
        lines += ["", f"TRL was left out: {trl['left_out']}."]
    return "\n".join(lines) + "\n"


def format_amount(gigabytes):
    return "-" if gigabytes is None else f"{gigabytes:.1f}"


if __name__ == "__main__":
    main()
