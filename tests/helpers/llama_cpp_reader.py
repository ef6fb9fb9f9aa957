"""Models read by llama.cpp itself: its server, in this process, from the package `xllamacpp` (`make llama-test`)."""

from __future__ import annotations

import json
import math
import urllib.request


class LlamaCppModel:
    """One GGUF file served by llama.cpp on the CPU, with keys and values in float32."""

    def __init__(self, file, vocab_size, context=512):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.port, params.warmup, params.verbosity = 0, False, 0
        self._server = xllamacpp.Server(params)
        self.vocab_size = vocab_size
        # An answer that ends at once, or within a character, has no probabilities: every answer is this letter.
        # The probabilities are those before the bias.
        self._letter = self.tokenize("a")[-1]

    def _post(self, route, **body):
        request = urllib.request.Request(
            f"{self._server.listening_address}/{route}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def tokenize(self, text):
        """Return the token IDs of a text, special tokens in it included, as for a completion."""
        return self._post("tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def render_chat(self, messages):
        """Return the prompt that the file's chat template gives."""
        return self._post("apply-template", messages=messages)["prompt"]

    def compute_logprobs(self, ids):
        """Return the log-probability of every possible next token, by its ID."""
        answer = self._post(
            "completion",
            prompt=list(ids),
            n_predict=1,
            n_probs=self.vocab_size,
            temperature=0,
            logit_bias=[[self._letter, 1000.0]],
            cache_prompt=False,
        )
        rows = answer["completion_probabilities"][0]["top_logprobs"]
        return {row["id"]: row["logprob"] or -math.inf for row in rows}

    def generate_greedily(self, ids, count):
        """Return the most likely continuation of a sequence, `count` tokens."""
        answer = self._post(
            "completion",
            prompt=list(ids),
            n_predict=count,
            temperature=0,
            samplers=["top_k"],
            top_k=1,
            ignore_eos=False,
            return_tokens=True,
            cache_prompt=False,
        )
        return answer["tokens"]
