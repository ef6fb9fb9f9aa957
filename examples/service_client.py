"""Two saved paths of a training run compared through the typed client: how far they are apart, and which to promote.

    posttrain service up service --set engine.bases.small=models/small
    TINKER_BASE_URL=http://127.0.0.1:8123 TINKER_API_KEY=... python examples/service_client.py

The client needs httpx alone; `AsyncServiceClient` has the same calls for asyncio.
"""

from rl_core.service.client import Sampling, ServiceClient

TEXTS = ["the quick brown fox", "one two three four", "a small model learns"]


def main(client=None, texts=TEXTS):
    """The comparison of the two newest saved paths of the newest run; None without two."""
    client = client or ServiceClient()  # address and key from the environment
    run = client.runs(limit=1).runs[0]
    print(
        f"{run.run_id}: {run.steps} updates of an adapter of rank {run.lora_rank} over {run.base_model}"
    )
    for kind, stats in client.queue_stats(run.run_id).kinds.items():
        print(
            f"  {kind}: {stats.waiting} wait, {stats.finished} done, p99 {stats.served_seconds.get('0.99', 0):.3f} s"
        )
    saved = [one for one in client.checkpoints(run.run_id) if one.kind != "external_weights"]
    if len(saved) < 2:
        print("save two paths first: save_state(NAME)")
        return None
    newest, before = saved[:2]
    found = client.evaluate(
        run.run_id,
        model=newest.path,
        against=before.path,
        texts=texts,
        prompts=["the"],
        num_samples=4,
        sampling=Sampling(max_tokens=8),
        evaluation_id=f"{newest.path} against {before.path}",  # asked again, it is not computed again
    )
    compared, samples = found.text_comparison, found.diversity
    print(
        f"KL {compared.kl.value:.4f} nats per token, {compared.kl.low:.4f} to {compared.kl.high:.4f}"
    )
    print(
        f"perplexity {found.against_text.perplexity.value:.2f} -> {found.text.perplexity.value:.2f}"
    )
    print(f"distinct-2 {samples.distinct['2'].value:.2f}, self-BLEU {samples.self_bleu.value:.2f}")
    better = newest if compared.nll_difference.value < 0 else before
    print(
        f"likelier texts: {better.path}; "
        + (f"posttrain promote {better.version}" if better.version else "no version")
    )
    return found


if __name__ == "__main__":
    main()
