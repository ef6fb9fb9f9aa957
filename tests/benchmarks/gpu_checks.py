"""Checks of one GPU, the parts of `gpu.py` that time little: numerics, resume, host reads, kernels, attention."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import torch
from speed.episodes import Scripted
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl_core.inference.engine import create_rollout_backend
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import SamplingSettings

LOGIT_SCALE = (
    20.0  # random weights give nearly equal log-probs, in which no difference would be seen
)


def measure_numerics(bench):
    """Compare log-probs of sampler and trainer at the sampled tokens, in bfloat16 and float32, with scaled logits."""
    result = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = bench.model().to(dtype).eval()
        with torch.no_grad():
            model.model.norm.weight.mul_(LOGIT_SCALE)
        new = min(64, bench.work["completion"])
        prompts = [
            np.random.default_rng([3, index])
            .integers(8, bench.config.vocab_size, 12 + index)
            .tolist()
            for index in range(8)
        ]
        engine = create_rollout_backend(model, eos_ids=(), pad_id=0, max_length=64 + new)
        sequences = [Scripted(ids, seed, limit=new) for seed, ids in enumerate(prompts)]
        engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=new, slots=8))
        rows = [
            TrainRow(s.prompt_ids, s.completion_ids, s.loss_mask, s.logprobs) for s in sequences
        ]
        differences = []
        for batch in build_batches(rows, 16384, 0):
            with torch.no_grad():
                trained_BS = completion_logprobs(model, batch.to(bench.device))[0].cpu()
            mask_BS = batch.loss_mask_BS
            differences.append((trained_BS - batch.sampler_logprobs_BS)[mask_BS].abs())
        gaps = torch.cat(differences)
        result[str(dtype).removeprefix("torch.")] = {
            "largest": float(gaps.max()),
            "mean": float(gaps.mean()),
            "entropy_bound": float(np.log(bench.config.vocab_size)),
            "mean_logprob": float(np.mean([np.mean(s.logprobs) for s in sequences])),
        }
    return result


def measure_resume(bench):
    """Compare the weights after 4 steps with those after 2, a copied state, and 2 more: bit for bit."""
    straight = bench.build_sft(steps=4)
    for _ in range(2):
        straight.step()
    resumed = bench.build_sft(steps=4)
    resumed.model.load_state_dict(straight.model.state_dict())
    resumed.optimizer_step.load_state_dict(copy.deepcopy(straight.optimizer_step.state_dict()))
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    losses = [[trainer.step()["train/loss"] for _ in range(2)] for trainer in (straight, resumed)]
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    different = sum(not torch.equal(left, right) for left, right in pairs)
    return {"equal": different == 0, "different_weights": different, "losses": losses}


def measure_reads(bench):
    """Count the times that a steady SFT step and an update stop the host, by torch's own warning."""
    if not bench.on_gpu:
        return {"left_out": "only a GPU is waited for; tests count on a pretended one"}
    trainer = bench.build_sft(steps=2)
    for _ in range(2):
        trainer.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stops = [item for item in caught if "synchroniz" in str(item.message)]
    lines = {}
    for item in stops:
        line = f"{item.filename.split('site-packages/')[-1]}:{item.lineno}"
        lines[line] = lines.get(line, 0) + 1
    return {"stops": len(stops), "lines": lines}


def measure_profile(bench):
    """List the kernels that take most of a steady SFT step, and the share of it in which the device is busy."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    trainer = bench.build_sft(steps=2)
    for _ in range(2):
        trainer.step()
    with torch.profiler.profile(activities=activities) as profile:
        began = bench.now()
        trainer.step()
        seconds = bench.now() - began
    name = "self_device_time_total" if bench.on_gpu else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, name))
    total = sum(getattr(event, name) for event in events)
    top = [
        {"kernel": event.key[:80], "share": getattr(event, name) / total, "calls": event.count}
        for event in events[:12]
    ]
    return {"seconds": seconds, "busy": total / 1e6 / seconds, "kernels": top}


def measure_backends(bench):
    """Measure the first and the steady SFT step with each kernel of attention that torch may choose."""
    result = {}
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        name = backend.name.lower().removesuffix("_attention")
        if backend == SDPBackend.MATH and bench.on_gpu:
            continue  # [heads, S, S] in memory
        try:
            trainer = bench.build_sft(steps=3)
            taken = []
            with sdpa_kernel(backend):
                for _ in range(4):
                    began = bench.now()
                    trainer.step()
                    taken.append(bench.now() - began)
            result[name] = {"first_seconds": taken[0], "seconds": min(taken[1:])}
        except RuntimeError as error:
            result[name] = {"refused": str(error).splitlines()[0][:120]}
        trainer = None
        bench.free_memory()
    return result


def format_checks(results):
    """Format the results of this module's parts as lines of Markdown."""
    lines = []
    if "bfloat16" in (numerics := results.get("numerics", {})):
        for dtype in ("bfloat16", "float32"):
            gap = numerics[dtype]
            lines += [
                "",
                f"Sampler and trainer, {dtype}: {gap['largest']:.2g} nats at most, {gap['mean']:.2g} on average, at a "
                f"mean log-prob of {gap['mean_logprob']:.2f}.",
            ]
    if "equal" in (resume := results.get("resume", {})):
        lines += ["", f"A resumed run has the bits of one in a row: {resume['equal']}."]
    if "stops" in (reads := results.get("reads", {})):
        lines += ["", f"Stops of the host in one SFT step: {reads['stops']} {reads['lines'] or ''}"]
    if "kernels" in (profile := results.get("profile", {})):
        lines += ["", f"The device is busy for {profile['busy']:.0%} of an SFT step:", ""]
        for item in profile["kernels"]:
            lines.append(f"- {item['share']:.1%} {item['kernel']} ({item['calls']} calls)")
    backends = results.get("backends", {})
    for name, item in backends.items():
        if isinstance(item, dict):
            text = item.get("refused") or (
                f"{item['seconds']:.3f} s a step, {item['first_seconds']:.3f} s the first"
            )
            lines += ["", f"Attention by {name}: {text}"]
    if "failed_parts" in (smoke := results.get("smoke", {})):
        lines += [
            "",
            f"Smoke: parts that fail with a tiny model: {smoke['failed_parts'] or 'none'}",
        ]
    return lines
