"""dspy: predictions over chat with JSON, over text completions, and over responses."""

import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy
import litellm
from checks import Checks

checks = Checks()
ADDRESS = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
OPTIONS = {**ADDRESS, "max_tokens": 400, "cache": False, "num_retries": 0}


class Look(dspy.Signature):
    """Look at the grid."""

    question: str = dspy.InputField()
    colour: Literal["red", "blue"] = dspy.OutputField()


with checks.passing("LM over chat"):
    assert dspy.LM("openai/small", **OPTIONS)("row 2")
with checks.passing("LM over text completions"):
    assert dspy.LM("openai/small", model_type="text", **OPTIONS)("row 2")
with checks.passing("LM over responses"):
    assert dspy.LM("openai/small", model_type="responses", **OPTIONS)("row 2")
with checks.passing("JSONAdapter, response_format"):
    known = {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}
    litellm.register_model({"openai/small": {**known, "max_tokens": 4000}})
    lm = dspy.LM("openai/small", **OPTIONS)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Look)(question="row 2").colour in ("red", "blue")
checks.print_report()
