"""Values of config fields as their declared types have them, or a sentence that names the choices."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import EllipsisType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from qpt.errors import QptError

_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    NoneType: "None",
    EllipsisType: "...",
}


COUNTS = ("steps", "batch_size", "context", "width", "layers", "heads", "critic_width", "candidates", "n_step")
# Numbers whose names mean the same in every config; beyond these a step climbs, or a value means nothing.
SHARES = (
    *("dropout", "attention_dropout", "condition_dropout", "ema", "critic_ema", "ema_rate", "target_rate"),
    *("expectile", "reward_expectile", "cost_expectile"),
)
SIZES = (
    *("weight_decay", "clip", "critic_clip", "warmup", "cost_ceiling"),
    *("rtg_noise", "ctg_noise", "action_noise", "test_radius"),
)
SCALES = ("return_scale", "cost_scale", "reward_scale", "critic_cost_scale", "normalizer_floor")


def check_fields(config: Any) -> None:
    """The `__post_init__` of a config: every value fits its field, whichever way it came in."""
    hints = get_type_hints(type(config))
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        try:
            object.__setattr__(config, name, fitting(value, hints[name]))  # configs are frozen
        except ValueError:
            raise QptError(f"{name} is {choices(hints[name])}, not {value!r}") from None
        if value is not None and (rule := _broken_rule(name, value)):
            raise QptError(f"{name} must be {rule}, not {value}")
    if "heads" in hints and "layers" in hints and config.width % config.heads:  # of a transformer
        raise QptError(f"the width must be a multiple of the heads, but {config.width} is not one of {config.heads}")


def _broken_rule(name: str, value: Any) -> str:
    """What a number of this name must be and this one is not."""
    if name in COUNTS and value < 1:
        return "at least 1"
    if name in SHARES and not 0 <= value <= 1:
        return "from 0 to 1"
    if (name in SIZES or name.endswith("lr")) and value < 0:
        return "at least 0"
    if name in SCALES and value <= 0:
        return "above 0"
    return "from 0 to below 1" if name == "betas" and not all(0 <= one < 1 for one in value) else ""


def fitting(value: Any, hint: Any) -> Any:
    """The value as a field of this type holds it, or a ValueError.

    Whole numbers become floats where those are asked for, numpy's scalars Python's own (JSON knows no others), lists
    tuples and texts paths. Types that none of our configs has are the business of whoever declares them.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        for one in inner:
            with suppress(ValueError):
                return fitting(value, one)
        raise ValueError
    if kind is tuple and isinstance(value, list | tuple | range):
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(fitting(each, one) for each, one in zip(value, kinds, strict=True))
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if kind is Literal:
        fits = any(type(value) is type(one) and value == one for one in inner)
    elif hint in _WORDS:
        fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        fits = fits and not (hint is float and not math.isfinite(value))
    else:
        fits = kind is not tuple
    if not fits:
        raise ValueError
    return value


def choices(hint: Any) -> str:
    """What a field of this type may be, in words."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is tuple:
        return f"[{', '.join(choices(type(one) if one is ... else one) for one in inner)}]"
    if kind in (Literal, Union, UnionType):
        *others, last = map(repr if kind is Literal else choices, inner)
        return f"{', '.join(others)} or {last}" if others else last
    return _WORDS.get(hint, str(hint))
