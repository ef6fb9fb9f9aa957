"""Program in the artifact of a registered reward model with a chat template: scores conversations under MLflow.

`write_mlflow_model` copies this file to `code/` of the artifact. It runs without posttrain, so it imports none of it.
A row of the input holds `messages`, or `prompt` and `completion`, or `text`, which is already rendered. Rows
may differ; MLflow then wants null for the messages of the others.

A conversation's token ids are those of training: the history and the header of the answer as the template renders them,
the answer's text, and the end of the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_COLUMNS = ("messages", "prompt", "completion", "text")


class RewardScorer:
    """Reward model behind MLflow's `predict`."""

    def __init__(self, folder: Path, end_of_turn: str) -> None:
        """Load the model in a Hugging Face folder. `end_of_turn`: the token that ends an answer in its template."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
        # Rows are scored one by one at their last token, which a padding token equal to it would hide.
        model.config.get_text_config().pad_token_id = None
        self._model = model.eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._end_of_turn = end_of_turn

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Score the rows of a DataFrame; return a DataFrame of `label` and `score`, the head's raw output.

        Raises: ValueError naming a row that cannot be scored.
        """
        import pandas
        import torch

        scores = []
        for index, row in enumerate(_iter_rows(model_input)):
            try:
                ids = self.encode_row(row)
            except ValueError as error:
                raise ValueError(f"row {index}: {error}") from error
            with torch.inference_mode():
                scores.append(float(self._model(torch.tensor([ids])).logits[0, 0]))
        return pandas.DataFrame({"label": self._model.config.id2label[0], "score": scores})

    def encode_row(self, row: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a row. Raises: ValueError."""
        if set(row) == {"text"}:
            return list(self._tokenizer(row["text"])["input_ids"])
        if set(row) == {"prompt", "completion"}:
            roles = (("user", row["prompt"]), ("assistant", row["completion"]))
            return self._encode_messages([{"role": role, "content": text} for role, text in roles])
        if set(row) == {"messages"}:
            return self._encode_messages([dict(message) for message in row["messages"]])
        raise ValueError(
            f"expected messages, or prompt and completion, or text; found {', '.join(row) or 'none of them'}"
        )

    def _encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if not messages or messages[-1].get("role") != "assistant":
            raise ValueError("the last message must be the assistant's: its reward is computed")
        header = self._tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=False
        )
        parts = (header, messages[-1].get("content") or "", self._end_of_turn)
        encoded = [self._tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        return [token for ids in encoded for token in ids]


def _iter_rows(model_input: Any) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row that have a value."""
    for record in model_input.to_dict("records"):
        columns = {name: record[name] for name in _COLUMNS if name in record}
        # Where rows differ in their columns, pandas fills up with None and NaN.
        yield {
            name: value
            for name, value in columns.items()
            if value is not None and not isinstance(value, float)
        }


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> RewardScorer:
    """Load the scorer; MLflow calls this with the artifact's folder."""
    return RewardScorer(Path(path) / "model", model_config["end_of_turn"])
