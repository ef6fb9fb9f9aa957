"""Labels and definitions of the report's measures."""

# Name of a metric, label, format.
METRICS = (
    ("reward_mean", "Mean reward", "{:.3f}"),
    ("turns_mean", "Turns per episode", "{:.2f}"),
    ("tool_calls_mean", "Tool calls per episode", "{:.2f}"),
    ("action_tokens_mean", "Sampled tokens per episode", "{:.1f}"),
    ("looked_rate", "Looked with a tool before answering", "{:.1%}"),
    ("rapr", "Pixel-space reasoning (RaPR)", "{:.1%}"),
    ("answered_rate", "Gave an answer", "{:.1%}"),
    ("truncated_rate", "Cut by a limit", "{:.1%}"),
    ("misuse_rate", "Turns that misused a tool", "{:.2%}"),
    ("trajectories_with_misuse", "Episodes with misuse", "{:.1%}"),
    ("loop_rate", "Episodes with a loop", "{:.1%}"),
    ("exploration_efficiency", "Exploration efficiency", "{:.3f}"),
    ("right_action_rate", "Right action, right place", "{:.3f}"),
    ("coherent_rate", "No repetition or retraction", "{:.1%}"),
    ("coherence", "Coherence", "{:.3f}"),
    ("distinct_2", "Diversity (distinct-2)", "{:.3f}"),
    ("same_opening_rate", "Most frequent opening", "{:.1%}"),
    ("strategy_entropy", "Strategy entropy (nats)", "{:.2f}"),
    ("nll_per_token", "NLL of own tokens (nats)", "{:.3f}"),
    ("entropy", "Entropy (nats per token)", "{:.3f}"),
    ("kl_to_first", "KL from the first model (nats per token)", "{:.3f}"),
    ("perplexity_under_first", "Fluency (perplexity under the first model)", "{:.2f}"),
    ("perplexity", "Perplexity of held-out demonstrations", "{:.3f}"),
)

# Measures that each episode has, whose differences are paired: 1 = more is better, -1 = less is, 0 = neither.
PAIRED_METRIC_DIRECTIONS = {
    "turns_mean": 0,
    "tool_calls_mean": 0,
    "action_tokens_mean": 0,
    "looked_rate": 1,
    "rapr": 1,
    "answered_rate": 1,
    "truncated_rate": -1,
    "trajectories_with_misuse": -1,
    "loop_rate": -1,
    "exploration_efficiency": 1,
    "right_action_rate": 1,
    "coherent_rate": 1,
}

# Measures that the report shows only where another exists: without a picture no tool can look at it.
SHOWN_WITH = {"looked_rate": "rapr"}

GLOSSARY = (
    (
        "Interval",
        "Success: Wilson 95%, at the effective sample size if episodes were sampled several times. Differences: "
        "paired bootstrap over episodes, 95%; of rewards and of the other measures that an episode has: normal, 95%. "
        "Other differences have no interval. Differences of shares are in points.",
    ),
    (
        "pass@k",
        "Probability that at least one of k samples of an episode succeeds: 1 - C(n-c, k) / C(n, k) for c successes of "
        "n samples, mean over episodes.",
    ),
    (
        "Looked with a tool",
        "Share of episodes with a tool observation before the answer. Tools of environments without images do not "
        "count; if only files are given, every tool counts.",
    ),
    (
        "RaPR",
        "Rate of pixel-space reasoning: share of episodes that call a visual tool (`Tool.is_visual`); "
        "if only files are given, every tool counts.",
    ),
    (
        "Misuse",
        "An action that parses as neither call nor answer, names no tool, or whose tool failed.",
    ),
    (
        "Loop",
        "A block of tool steps (same actions, same observations) that is immediately repeated.",
    ),
    (
        "Exploration efficiency",
        "Distinct useful observations over steps; 1 = no step was wasted on an error or a known observation.",
    ),
    (
        "Right action, right place",
        "Useful tool steps (as above) and right answers that are no guesses, over all turns, mean over episodes; "
        "1 = every turn was one of these.",
    ),
    (
        "No repetition or retraction",
        "Share of episodes without a repeated action and without an answer that differs from the previous one.",
    ),
    (
        "Coherence",
        "Mean score of the reward component of that name, with default settings, on the first model's hidden states: "
        "cosine similarity of consecutive turns within a band, minus 0.5 per repeated action and per retracted answer.",
    ),
    (
        "Diversity",
        "distinct-2: distinct word bigrams over all bigrams, in the actions of up to 1,000 episodes of each model. "
        "Most frequent opening: the share of these episodes whose actions begin with the same three words. "
        "Strategy entropy: of the distribution of tool sequences.",
    ),
    (
        "Entropy and KL",
        "At every sampled token, over the model's own episodes, teacher-forced on the sampled tokens, "
        "exact over the vocabulary at temperature 1: H = -sum p log p; KL(model || first) = sum p (log p - log q).",
    ),
    (
        "Fluency",
        "exp of the mean nats per sampled token of the model's own episodes under the first model, teacher-forced at "
        "temperature 1. Far above the first model's own value: text that the first model finds strange, as of a policy "
        "that pleases its reward; far below: stock phrases.",
    ),
    (
        "Perplexity",
        "exp of the mean nats per assistant token of held-out demonstrations; comparable within one tokenizer.",
    ),
    (
        "Reward model",
        "Scores are defined up to an offset, so calibration is measured on pairs of a success and a failure on one "
        "episode, with confidence sigmoid(|difference of scores|). Calibration error: mean gap between confidence and "
        "accuracy, over up to ten bins. AUC: probability that a random success outscores a random failure.",
    ),
    ("Turning point", "The first turn in which a model acts differently from the first model."),
)
