"""mini-swe-agent: its default agent over litellm."""

import os

os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
from checks import Checks
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

checks = Checks()
with checks.passing("DefaultAgent, two steps"):
    model = LitellmModel(model_name="openai/small", model_kwargs={"max_tokens": 30})
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template="Use bash.",
        instance_template="{{task}}",
        step_limit=2,
    )
    agent.run("row 2")
    assert agent.n_calls == 2
checks.print_report()
