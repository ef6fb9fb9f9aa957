"""Trainers of every algorithm on letters, by name."""

from helpers.letters import LOW, FewLetters, Walk, make_trainer
from rl_core.settings import (
    CriticSettings,
    ReplaySettings,
    SamplingSettings,
    TurnCreditSettings,
)

WALK = SamplingSettings(max_completion_tokens=30, max_turns=4)

RECIPES = {
    "ppo": dict(algorithm="ppo", epochs=2, learning_rate=5e-3),
    "ppo_shared": dict(
        algorithm="ppo", critic=CriticSettings(kind="shared"), epochs=2, learning_rate=5e-3
    ),
    "dapo": dict(algorithm="dapo", overlong_buffer=0),
    # a sequence of three tokens moves the ratio a thousand times further than the clip made for thousands of tokens
    "gspo": dict(algorithm="gspo", epochs=2, clip_eps=0.2, clip_eps_high=0.2, learning_rate=5e-3),
    "cispo": dict(algorithm="cispo", epochs=2, learning_rate=5e-3),
    "sapo": dict(algorithm="sapo", epochs=2, learning_rate=5e-3),
    "dppo": dict(algorithm="dppo", epochs=2, minibatches=2, learning_rate=5e-3),
    "dppo_topk": dict(
        algorithm="dppo", dppo_divergence="topk_kl", dppo_topk=4, epochs=2, learning_rate=5e-3
    ),
    "dppo_replay": dict(algorithm="dppo", replay=ReplaySettings(iterations=2, share=0.5)),
    "maxrl": dict(algorithm="maxrl"),
    "maxrl_order": dict(algorithm="maxrl", maxrl_order=2),
    "gdpo": dict(algorithm="gdpo", dynamic_sampling_tries=1),
    "reinforce": dict(algorithm="reinforce"),
    "reinforce_learned_baseline": dict(algorithm="reinforce", critic=CriticSettings()),
    "replay": dict(
        algorithm="grpo", importance="token", replay=ReplaySettings(iterations=2, share=0.5)
    ),
    "turn_credit": dict(
        turn_credit=TurnCreditSettings(), sampling=WALK, environment=Walk(), context=64
    ),
    "kl_reward": dict(algorithm="rloo", kl_coef=0.01, kl_in="reward"),
}


def build_recipe(tokenizer, name, **more):
    options = {**RECIPES[name], "curriculum": LOW, **more}
    reference = make_trainer(tokenizer).policy if options.get("kl_coef") else None
    return make_trainer(
        tokenizer, options.pop("environment", None) or FewLetters(), reference=reference, **options
    )
