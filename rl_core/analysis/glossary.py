"""How the report names its measures, and what they mean."""

__all__ = ["GLOSSARY", "MEASURES"]

# Name of a metric, label, format.
MEASURES = (
    ("reward_mean", "Mean reward", "{:.3f}"),
    ("turns_mean", "Turns per episode", "{:.2f}"),
    ("tool_calls_mean", "Tool calls per episode", "{:.2f}"),
    ("action_tokens_mean", "Sampled tokens per episode", "{:.1f}"),
    ("looked_rate", "Looked with a tool before answering", "{:.1%}"),
    ("answered_rate", "Gave an answer", "{:.1%}"),
    ("truncated_rate", "Cut by a limit", "{:.1%}"),
    ("misuse_rate", "Turns that misused a tool", "{:.2%}"),
    ("trajectories_with_misuse", "Episodes with misuse", "{:.1%}"),
    ("loop_rate", "Episodes with a loop", "{:.1%}"),
    ("exploration_efficiency", "Exploration efficiency", "{:.3f}"),
    ("coherent_rate", "Nothing repeated or taken back", "{:.1%}"),
    ("coherence", "Coherence", "{:.3f}"),
    ("distinct_2", "Diversity (distinct-2)", "{:.3f}"),
    ("strategy_entropy", "Strategy entropy (nats)", "{:.2f}"),
    ("nll_per_token", "Surprise of own tokens (nats)", "{:.3f}"),
    ("entropy", "Entropy (nats per token)", "{:.3f}"),
    ("kl_to_first", "KL from the first model (nats per token)", "{:.3f}"),
    ("perplexity", "Perplexity of held-out demonstrations", "{:.3f}"),
)

GLOSSARY = (
    (
        "Interval",
        "Success: Wilson 95%, at the effective sample size where an episode was sampled several times. Differences: "
        "paired bootstrap over episodes, 95%; of rewards: normal, 95%.",
    ),
    (
        "pass@k",
        "Chance that at least one of k samples of an episode succeeds: 1 - C(n-c, k) / C(n, k) for c successes of n "
        "samples, mean over episodes.",
    ),
    (
        "Looked with a tool",
        "Share of episodes in which a tool showed the policy something before it answered: reasoning in pixel space. "
        "Tools of an environment without images do not count; where only files are given, every tool does.",
    ),
    ("Misuse", "An action that parses as neither call nor answer, names no tool, or whose tool failed."),
    (
        "Loop",
        "A block of tool steps (the same actions leading to the same observations) that is at once repeated.",
    ),
    (
        "Exploration efficiency",
        "Distinct useful observations over steps; 1 = no step was wasted on an error or on what was known already.",
    ),
    (
        "Nothing repeated or taken back",
        "Episodes without an action written before and without an answer that differs from the one stated before it.",
    ),
    (
        "Coherence",
        "Mean score of the reward component of that name, with its defaults, in the states of the first model: cosines "
        "of neighbouring turns within a band, less 0.5 for every action repeated and every answer taken back.",
    ),
    (
        "Diversity",
        "distinct-2: distinct pairs of neighbouring words over all pairs, in the actions of up to 1,000 episodes of "
        "each model. Strategy entropy: of the sequences of tools used.",
    ),
    (
        "Entropy and KL",
        "Before every token that a model sampled, over its own episodes, teacher-forced on the tokens as sampled, "
        "exact over the vocabulary at temperature 1: H = -sum p log p; KL(model || first) = sum p (log p - log q).",
    ),
    (
        "Perplexity",
        "exp of the mean nats per assistant token of held-out demonstrations; it compares models with one tokenizer.",
    ),
    (
        "Reward model",
        "Its scores have no zero, so calibration is measured on pairs of a success and a failure at the same episode: "
        "it is sure with sigmoid(|difference of scores|). Calibration error: mean gap between how sure it is and how "
        "often it is right, over up to ten bins. AUC: chance that any success outscores any failure.",
    ),
    ("Turning point", "The first turn in which a model acts differently from the first model."),
)
