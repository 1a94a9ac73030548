"""Values of config fields as their declared types have them, or a sentence that names the choices."""

from __future__ import annotations

import math
from collections.abc import Callable
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

_RULES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda x: bool(x >= 1),
    "at least 2": lambda x: bool(x >= 2),
    "at least 0": lambda x: bool(x >= 0),
    "above 0": lambda x: bool(x > 0),
    "from 0 to 1": lambda x: bool(0 <= x <= 1),
    "from 0 to below 1": lambda x: bool(0 <= x < 1),
    "above 0 and at most 1": lambda x: bool(0 < x <= 1),
    "above 0 and below 1": lambda x: bool(0 < x < 1),
    "a low and a higher number": lambda x: bool(x[0] < x[1]),
    "one number or more": lambda x: len(x) > 0,
}
# Numbers whose names mean the same in every config; beyond these a step climbs, or a value means nothing.
_NAMES = {
    "at least 1": "steps batch_size context width layers heads critic_width candidates n_step",
    "at least 0": "weight_decay clip critic_clip warmup cost_ceiling cost_limit rtg_noise ctg_noise action_noise",
    "above 0": "return_scale cost_scale reward_scale critic_cost_scale normalizer_floor",
    "from 0 to 1": "condition_dropout ema critic_ema ema_rate target_rate expectile reward_expectile cost_expectile",
    "from 0 to below 1": "dropout attention_dropout",
    "above 0 and at most 1": "discount cost_discount",
}
_SHARED = {name: rule for rule, names in _NAMES.items() for name in names.split()}


def check_fields(config: Any, **rules: str) -> None:
    """The `__post_init__` of a config: every value fits its field, whichever way it came in.

    `rules` are those of single fields, by name, beyond what a name means in every config.
    """
    hints = get_type_hints(type(config))
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        try:
            object.__setattr__(config, name, fitting(value, hints[name]))  # configs are frozen
        except ValueError:
            raise QptError(f"{name} is {choices(hints[name])}, not {value!r}") from None
        rule = rules.get(name) or ("at least 0" if name.endswith("lr") else _SHARED.get(name))
        if value is not None and rule and not _RULES[rule](value):
            raise QptError(f"{name} must be {rule}, not {value}")
    if "betas" in hints and not all(0 <= one < 1 for one in config.betas):
        raise QptError(f"betas must be from 0 to below 1, not {config.betas}")
    if "heads" in hints and "layers" in hints and config.width % config.heads:  # of a transformer
        raise QptError(f"the width must be a multiple of the heads, but {config.width} is not one of {config.heads}")


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
        fits = fits and not (hint is int and abs(value) >= 2**64)  # no tensor or file holds it
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
