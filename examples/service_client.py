"""Comparison of two saved paths of a training run with the typed client: how different they are, and which to promote.

    posttrain service up service --set engine.bases.small=models/small
    TINKER_BASE_URL=http://127.0.0.1:8123 TINKER_API_KEY=... python examples/service_client.py

The client only needs httpx; `AsyncServiceClient` has the same calls for asyncio.
"""

from rl_core.service.client import Sampling, ServiceClient

TEXTS = ["the quick brown fox", "one two three four", "a small model learns"]


def main(client=None, texts=TEXTS):
    """Compare the two newest saved paths of the newest run; return None without two."""
    client = client or ServiceClient()  # address and key from the environment
    run = client.runs(limit=1).runs[0]
    adapter = f"adapter of rank {run.lora_rank} over {run.base_model}"
    print(f"{run.run_id}: {run.steps} updates of an {adapter}")
    for kind, stats in client.queue_stats(run.run_id).kinds.items():
        p99 = stats.served_seconds.get("0.99", 0)
        print(f"  {kind}: {stats.waiting} wait, {stats.finished} done, p99 {p99:.3f} s")
    paths = [path for path in client.checkpoints(run.run_id) if path.kind != "external_weights"]
    if len(paths) < 2:
        print("save two paths first: save_state(NAME)")
        return None
    newest, previous = paths[:2]
    result = client.evaluate(
        run.run_id,
        model=newest.path,
        against=previous.path,
        texts=texts,
        prompts=["the"],
        num_samples=4,
        sampling=Sampling(max_tokens=8),
        evaluation_id=f"{newest.path} against {previous.path}",  # a repeated id is not recomputed
    )
    comparison, samples = result.text_comparison, result.diversity
    kl = comparison.kl
    print(f"KL {kl.value:.4f} nats per token, {kl.low:.4f} to {kl.high:.4f}")
    before, after = result.against_text.perplexity.value, result.text.perplexity.value
    print(f"perplexity {before:.2f} -> {after:.2f}")
    print(f"distinct-2 {samples.distinct['2'].value:.2f}, self-BLEU {samples.self_bleu.value:.2f}")
    better = newest if comparison.nll_difference.value < 0 else previous
    advice = f"posttrain promote {better.version}" if better.version else "no version"
    print(f"likelier texts: {better.path}; {advice}")
    return result


if __name__ == "__main__":
    main()
