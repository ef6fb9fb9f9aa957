"""The peer's side of training: TRL's trainers, held after each optimizer step (each round, for grpo and ppo).

What is set makes both sides do the same work: float32 without autocast, no activation checkpointing, no logging, no
saving, rows in the order of the file, the same constant learning rate. All else is TRL's default.
"""

from __future__ import annotations

import tempfile

import datasets
import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from speed import inputs

ROWS = {"sft": "sft", "reward": "pairs", "dpo": "pairs"}  # the others take prompts


class Counter:
    """Real tokens and loss of the batches that a trainer's `compute_loss` sees."""

    def __init__(self, trainer):
        self.tokens, self.loss = 0, 0.0
        inner = trainer.compute_loss

        def counted(model, batch, *args, **kwargs):
            self.tokens += count_real_tokens(batch)
            out = inner(model, batch, *args, **kwargs)
            self.loss = float((out[0] if isinstance(out, tuple) else out).detach())
            return out

        trainer.compute_loss = counted

    def take(self):
        tokens, self.tokens = self.tokens, 0
        return tokens, self.loss


def count_real_tokens(batch):
    """Count tokens that are no padding."""
    if "prompt_mask" in batch:
        return int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
    return int(batch["attention_mask"].sum())


class Hold(transformers.TrainerCallback):
    """Callback that answers after every `every` optimizer steps, then waits for the next request."""

    def __init__(self, gate, every, take):
        self.gate, self.every, self.take, self.steps = gate, every, take, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        if self.steps % self.every == 0:
            self.gate.done(*self.take())
            self.gate.wait()


def run(stage, folder, steps, gate):
    """Make the trainer, then train for as many steps as requested."""
    datasets.disable_progress_bars()
    datasets.disable_caching()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = inputs.read(folder, ROWS.get(stage, "prompts"))
    epochs = 4 if stage == "grpo4" else 1
    with tempfile.TemporaryDirectory() as output:
        if stage == "ppo":
            trainer = make_ppo_trainer(folder, tokenizer, rows, output, steps)
            mean = sum(len(row["prompt"]) for row in rows) / len(
                rows
            )  # it shuffles, and tells no one
            per_round = round(inputs.BATCH["ppo"] * (mean + inputs.MAX_NEW))
            take = lambda: (per_round, None)  # noqa: E731
        else:
            trainer = make_trainer(stage, folder, tokenizer, rows, output, steps, epochs)
            counter = Counter(trainer)
            is_sampled = stage.startswith("grpo")

            def take():
                tokens, loss = counter.take()
                return (tokens // epochs, None) if is_sampled else (tokens, loss)

        trainer.add_callback(Hold(gate, epochs, take))
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        }
        gate.ready(versions=versions)
        gate.wait()
        trainer.train()


def build_common_options(stage, output):
    return dict(
        output_dir=output,
        per_device_train_batch_size=inputs.BATCH[stage],
        learning_rate=inputs.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=inputs.BETAS[0],
        adam_beta2=inputs.BETAS[1],
        weight_decay=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        seed=inputs.SEED,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def load_policy(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def load_scorer(folder):
    return AutoModelForSequenceClassification.from_pretrained(
        folder / "reward_model", dtype=torch.float32, num_labels=1
    )


def make_trainer(stage, folder, tokenizer, rows, output, steps, epochs):
    options = build_common_options(stage, output)
    # one step more than is asked for: the loop then waits at its end, instead of ending by itself
    options["max_steps"] = (steps + 1) * epochs
    data = datasets.Dataset.from_list(rows)
    if stage in ("sft", "reward", "dpo"):
        options |= {"max_length": inputs.MAX_LENGTH, "train_sampling_strategy": "sequential"}
    shared = {"train_dataset": data, "processing_class": tokenizer}
    if stage == "sft":
        return trl.SFTTrainer(model=load_policy(folder), args=trl.SFTConfig(**options), **shared)
    if stage == "reward":
        return trl.RewardTrainer(
            model=load_scorer(folder), args=trl.RewardConfig(**options), **shared
        )
    if stage == "dpo":
        args = trl.DPOConfig(**options)
        return trl.DPOTrainer(
            model=load_policy(folder), ref_model=load_policy(folder), args=args, **shared
        )

    def reward(prompts, completions, answer, **_):
        return [inputs.score(text, right) for text, right in zip(completions, answer, strict=True)]

    args = trl.GRPOConfig(
        **options,
        num_generations=inputs.GROUP,
        max_completion_length=inputs.MAX_NEW,
        temperature=1.0,
        num_iterations=epochs,
        beta=0.0,
        shuffle_dataset=False,
    )
    return trl.GRPOTrainer(model=load_policy(folder), reward_funcs=reward, args=args, **shared)


def make_ppo_trainer(folder, tokenizer, rows, output, steps):
    """Make the experimental PPO of TRL 1.12: a reward model, a separate value model, one epoch of one minibatch."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    batch = inputs.BATCH["ppo"]
    args = PPOConfig(
        **build_common_options("ppo", output),
        total_episodes=(steps + 1) * batch,
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=inputs.MAX_NEW,
        temperature=1.0,
        num_sample_generations=0,
        local_rollout_forward_batch_size=batch,
        kl_coef=0.05,
    )
    data = datasets.Dataset.from_list(
        [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in rows]
    )
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=load_policy(folder),
        ref_model=load_policy(folder),
        reward_model=load_scorer(folder),
        value_model=load_scorer(folder),
        train_dataset=data,
        eval_dataset=data.select(range(batch)),
    )
