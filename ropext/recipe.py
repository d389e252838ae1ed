"""Stages of training as a person writes them down: a YAML file, read into frozen values; unknown keys are errors.

Lengths and amounts of text are in tokens and take the suffixes of the command line ("8k").
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ropext.errors import UsageError, first_line
from ropext.lengths import parse_length


def _tokens(value: Any) -> Any:
    """What "8k" names; a message of ours for anything else."""
    try:
        return parse_length(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else value
    except UsageError as error:
        raise ValueError(str(error)) from None


Tokens = Annotated[int, BeforeValidator(_tokens), Field(strict=True)]
STRICT = ConfigDict(extra="forbid", frozen=True)


class StageRecipe(BaseModel):
    """One stage; what is left out is as the command line says for all of them."""

    model_config = STRICT

    length: Tokens
    tokens: Tokens | None = None  # in all its steps
    steps: Annotated[int, Field(ge=1, strict=True)] | None = None
    batch_tokens: Tokens | None = None  # of an optimizer step
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # its peak of the curve
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None  # of a progressive patch


class Recipe(BaseModel):
    """A run of training."""

    model_config = STRICT

    stages: Annotated[tuple[StageRecipe, ...], Field(min_length=1)]


def read_recipe(path: Path) -> Recipe:
    """Raises UsageError that names the place in the file, for whatever is no recipe."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"a recipe is a YAML file: {path} is not ({first_line(error)})") from None
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        found = error.errors()[0]
        place = ".".join(map(str, found["loc"])) or "the whole"
        raise UsageError(f"a recipe must fit: {place} of {path} does not ({found['msg']})") from None
