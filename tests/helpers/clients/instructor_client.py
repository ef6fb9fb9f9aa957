"""instructor: its modes of structured output, and lists."""

from typing import Literal

import instructor
import openai
from checks import Checks
from pydantic import BaseModel, Field

checks = Checks()
ASKED = {"model": "small", "messages": [{"role": "user", "content": "row 2"}], "seed": 1}


class Cell(BaseModel):
    """A cell of the grid."""

    colour: Literal["red", "blue"]
    row: int = Field(ge=0, le=9)


class Grid(BaseModel):
    """Cells, with a nested model."""

    cells: list[Cell] = Field(min_length=1, max_length=2)


for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    kind = getattr(instructor.Mode, mode, None)
    if kind is None:
        continue
    with checks.passing(f"mode {mode}"):
        client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=kind)
        if mode == "RESPONSES_TOOLS":
            options = {"model": "small", "input": "row 2"}
            assert client.responses.create(**options, response_model=Grid, max_retries=1).cells
        elif mode == "JSON":  # json_object: any object, so that its fields are the model's matter
            try:
                client.chat.completions.create(
                    **ASKED, response_model=Cell, max_retries=1, max_tokens=300
                )
            except Exception as error:
                assert "validation error" in str(error) or "IncompleteOutput" in repr(error), error
        else:
            for shape in (Cell, Grid):
                result = client.chat.completions.create(
                    **ASKED, response_model=shape, max_retries=1, max_tokens=900
                )
                assert isinstance(result, shape)
checks.print_report()
