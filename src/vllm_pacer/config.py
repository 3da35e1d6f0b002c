"""The one validated configuration. Flags, files and Python calls only produce it.

Every error says what was given, what is allowed and what to write instead.
"""

import difflib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from vllm_pacer.quota import Quota, Quotas

MAX_USER_NAME_LENGTH = 256
_NOT_IN_NAMES = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's categories of control characters, surrogates, line and paragraph separators."""
MIN_RATE = Fraction(1, 1000)
MAX_RATE = Fraction(1_000_000_000)
MAX_BURST_SECONDS = Fraction(3600)
SHORTEST_STEP_SECONDS = Fraction(1, 1000)
"""No engine is faster, so with a shorter burst quota expires in every step."""
MIN_WEIGHT = Fraction(1, 1000)
MAX_WEIGHT = Fraction(1000)

_RATE_HELP = (
    f"write a number from {float(MIN_RATE):g} to {int(MAX_RATE):,} (tokens per second), "
    "or null for no limit"
)
_IN_PYTHON = {"null": "None", "on or off": "True or False"}
"""What is written in Python for what is written in a flag or a file."""
_AS_WRITTEN = {"got None;": "got null;", "got True;": "got true;", "got False;": "got false;"}
"""What was written in a flag or a file, for what it became in Python."""
_AS_TEXT = "text"
"""The context in which settings from a flag or a file are validated; without it, from Python."""

_NUMBER = re.compile(r"-?(0|[1-9]\d{0,29})(\.\d{1,30})?([eE][-+]?\d{1,2})?")
"""A number of JSON's form and of a size that can be meant: 1e-999999999 as an exact fraction would
fill the memory."""


class ConfigError(ValueError):
    """A setting cannot be used; the message is for the person who wrote it."""


def check_user_name(name: object) -> str:
    """Return the name if it can name a user.

    Raises:
        ValueError: It is not a string, is empty, is longer than 256 characters, or has a character
            that would break a line of the log or cannot be encoded.
    """
    if not isinstance(name, str):
        raise ValueError(f"must be a string, got {name!r}; write it in quotes")
    if not name:
        raise ValueError("must not be empty")
    if len(name) > MAX_USER_NAME_LENGTH:
        raise ValueError(f"must have at most {MAX_USER_NAME_LENGTH} characters, got {len(name)}")
    if not name.isprintable():
        for character in name:
            if unicodedata.category(character) in _NOT_IN_NAMES:
                raise ValueError(
                    f"must not contain {character!r}, got {_shown(name)}; leave out control "
                    "characters, line breaks and lone surrogates"
                )
    return name


def _exact_number(value: object, lowest: Fraction, highest: Fraction, help_text: str) -> Fraction:
    if isinstance(value, Decimal):
        is_number = _NUMBER.fullmatch(str(value)) is not None
    else:
        is_number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest:  # type: ignore[operator]
        raise ValueError(f"got {_shown(value)}; {help_text}")
    # A float stands for the decimal that was written, which is its shortest representation.
    return Fraction(repr(float(value))) if isinstance(value, float) else Fraction(value)  # type: ignore[call-overload]


def _shown(value: object) -> str:
    """Return what was given, at a length that suits a message."""
    try:
        text = str(value) if isinstance(value, Decimal | Fraction) else repr(value)
    except ValueError:  # Python does not write out integers of more than 4,300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _hint(text: str, info: ValidationInfo) -> str:
    """Return a hint in the words of the place where the settings were written."""
    if info.context != _AS_TEXT:
        for written, in_python in _IN_PYTHON.items():
            text = text.replace(written, in_python)
    return text


def _rate(value: object, info: ValidationInfo) -> Fraction | None:
    if value is None:
        return None
    return _exact_number(value, MIN_RATE, MAX_RATE, _hint(_RATE_HELP, info))


def _burst(value: object) -> Fraction:
    help_text = f"write a number of seconds from 0 to {int(MAX_BURST_SECONDS)}"
    return _exact_number(value, Fraction(0), MAX_BURST_SECONDS, help_text)


def _weight(value: object) -> Fraction:
    help_text = f"write a number from {float(MIN_WEIGHT):g} to {int(MAX_WEIGHT):,}"
    return _exact_number(value, MIN_WEIGHT, MAX_WEIGHT, help_text)


def _fairness(value: object, info: ValidationInfo) -> bool:
    on_or_off = {"on": True, "off": False}.get(value) if isinstance(value, str) else value
    if not isinstance(on_or_off, bool):
        raise ValueError(f"got {_shown(value)}; {_hint('write on or off', info)}")
    return on_or_off


def _users(value: object, info: ValidationInfo) -> dict[str, object]:
    help_text = 'tokens per second, for example {"user-a": 100, "user-b": null}'
    return _by_user(value, _hint(help_text, info))


def _weights(value: object) -> dict[str, object]:
    return _by_user(value, 'weight, for example {"user-a": 2}; everybody else has the weight 1')


def _by_user(value: object, help_text: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"got {_shown(value)}; write a mapping from user to {help_text}")
    for name in value:
        try:
            check_user_name(name)
        except ValueError as error:
            raise ValueError(f"a user's name {error}") from None
    return dict(value)


Rate = Annotated[Fraction | None, BeforeValidator(_rate)]
Weight = Annotated[Fraction, BeforeValidator(_weight)]


class PacerConfig(BaseModel):
    """Quotas of all users, and how they share the engine.

    Attributes:
        default: Tokens per second of every user that is not named; `None` for no limit.
        users: Tokens per second by user; `None` for no limit.
        burst: Seconds' worth of tokens that a user may be ahead of its rate.
        weights: A user's weight when slots, KV blocks and positions are shared; 1 if not named.
        fairness: Whether users share the engine by weight; if not, requests are taken in vLLM's
            own order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    default: Rate
    users: Annotated[dict[str, Rate], BeforeValidator(_users)] = {}
    burst: Annotated[Fraction, BeforeValidator(_burst)] = Fraction(1, 10)
    weights: Annotated[dict[str, Weight], BeforeValidator(_weights)] = {}
    fairness: Annotated[bool, BeforeValidator(_fairness)] = True

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping):
            given = "nothing" if data is None else _shown(data)
            raise ValueError(f"got {given}; write a mapping with the keys {_known_keys()}")
        for key in data:
            if key not in cls.model_fields:
                raise ValueError(_unknown_key(key))
        if "default" not in data:
            help_text = "add one for the users that are not named, or null for no limit"
            raise ValueError(f"no default is given; {_hint(help_text, info)}")
        return data

    def quotas(self) -> Quotas:
        """Return the quotas, with one object for all users of the same rate."""
        burst_ns = int(self.burst * 1_000_000_000)
        shared: dict[Fraction | None, Quota | None] = {None: None}
        for rate in (self.default, *self.users.values()):
            if rate not in shared:
                shared[rate] = Quota(rate, burst_ns)  # type: ignore[arg-type]
        return Quotas(
            shared[self.default], {user: shared[rate] for user, rate in self.users.items()}
        )

    def describe(self) -> str:
        """Return the limits in one line, for the log."""
        named = ", ".join(f"{user}: {format_rate(rate)}" for user, rate in self.users.items())
        if len(self.users) > 8:
            limited = sum(rate is not None for rate in self.users.values())
            named = f"{len(self.users)} users named, {limited} of them limited"
        parts = [f"default {format_rate(self.default)}", f"burst {float(self.burst):g} s"]
        if named:
            parts.append(named)
        if self.weights:
            parts.append(f"{len(self.weights)} weights")
        if not self.fairness:
            parts.append("fairness off")
        return ", ".join(parts)

    def warnings(self) -> list[str]:
        """Return what can be used but hardly be meant, in a sentence each."""
        found = []
        if self.weights and not self.fairness:
            found.append(
                "weights have no effect while fairness is off; leave them out, or switch it on"
            )
        is_limited = any(rate is not None for rate in (self.default, *self.users.values()))
        if is_limited and self.burst < SHORTEST_STEP_SECONDS:
            found.append(
                f"a burst of {float(self.burst):g} s is shorter than any step: quota that is not "
                "used within it expires, so users stay below their limits; write more seconds "
                "than the longest usual step takes"
            )
        return found


def format_rate(rate: Fraction | None) -> str:
    """Return a rate as text: `100 tokens/s` or `no limit`."""
    return "no limit" if rate is None else f"{float(rate):.15g} tokens/s"


def make_config(data: object, source: str) -> PacerConfig:
    """Validate settings from Python.

    Args:
        data: The settings: a mapping with the keys of `PacerConfig`.
        source: Where they come from, for the error message.

    Raises:
        ConfigError: A setting cannot be used.
    """
    return _validated(data, source, None)


def _validated(data: object, source: str, context: str | None) -> PacerConfig:
    try:
        return PacerConfig.model_validate(data, context=context)
    except ValidationError as error:
        raise ConfigError(_explain(error, source, context)) from None


def config_from_flags(default: str | None, users: str | None, file: str | None) -> PacerConfig:
    """Build the configuration from the texts given on the command line.

    Raises:
        ConfigError: A setting cannot be used.
    """
    if file is not None:
        if default is not None or users is not None:
            raise ConfigError(
                "--user-output-rate-config cannot be combined with the other "
                "--*-output-tokens-per-second flags; put all limits into the file, or none"
            )
        return config_from_file(file)
    if default is None:
        raise ConfigError(
            "--user-output-tokens-per-second names users but "
            "--default-user-output-tokens-per-second is missing; give a default for everybody "
            "else, or null for no limit"
        )
    flag = "--default-user-output-tokens-per-second"
    if default == "None":
        default = "null"  # what vLLM makes of a null in its own --config file
    config = _validated({"default": _json(default, flag, _RATE_HELP)}, flag, _AS_TEXT)
    if users is None:
        return config
    flag = "--user-output-tokens-per-second"
    by_user = _json(users, flag, 'write for example \'{"user-a": 100, "user-b": null}\'')
    return _validated({"default": config.default, "users": by_user}, flag, _AS_TEXT)


def config_from_file(file: str | Path) -> PacerConfig:
    """Read a YAML or JSON file with the keys of `PacerConfig`.

    Raises:
        ConfigError: The file cannot be read, or a setting in it cannot be used.
    """
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # not UTF-8, or a path that cannot be one
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot read {str(file)!r}: {reason}; "
            "give the path of a YAML or JSON file that the server may read"
        ) from None
    if str(file).endswith(".json"):
        data = _json(text, str(file), f"write a JSON object with the keys {_known_keys()}")
    else:
        data = _yaml(text, str(file))
    return _validated(data, str(file), _AS_TEXT)


def _json(text: str, source: str, help_text: str) -> Any:
    try:
        return json.loads(
            text,
            parse_int=_number,
            parse_float=_number,
            parse_constant=str,
            object_pairs_hook=_without_duplicates,
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{source}: got {_shown(text)}, which is not valid JSON: {error}; {help_text}"
        ) from None


def _number(text: str) -> int | Decimal | str:
    """Return the number that was written, or its text if it cannot be meant."""
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.removeprefix("-").isdigit() else Decimal(text)


def _without_duplicates(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ConfigError(_given_twice(key))
        mapping[key] = value
    return mapping


def _given_twice(key: object) -> str:
    return f"{_shown(key)} is given twice; keep one of the two"


class _StrictLoader(yaml.SafeLoader):
    """YAML that does not drop the first of two equal keys and knows JSON's numbers only.

    YAML 1.1 takes 010 for eight, 1:30 for ninety and 1e3 for a text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, refusing duplicate keys."""
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"line {line}: a key must be text; write it in quotes")
            key = self.construct_object(key_node, deep=True)
            if key in mapping:
                raise ConfigError(f"line {line}: {_given_twice(key)}")
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def construct_null(self, node: yaml.ScalarNode) -> None:
        """Refuse a value that was left out: it would be no limit, which may not be meant."""
        if not node.value:
            raise ConfigError(
                f"line {node.start_mark.line + 1}: a key without a value; write it after a colon "
                "and a space; in default and users that is a number, or null for no limit"
            )

    def construct_number(self, node: yaml.ScalarNode) -> int | Decimal | str:
        """Build a number as `_json` does."""
        return _number(str(node.value))


_YAML_NUMBERS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int")
_StrictLoader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] not in _YAML_NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(
    _YAML_NUMBERS[0], re.compile(f"({_NUMBER.pattern})$"), list("-0123456789")
)
_StrictLoader.add_constructor("tag:yaml.org,2002:null", _StrictLoader.construct_null)
for _tag in _YAML_NUMBERS:
    _StrictLoader.add_constructor(_tag, _StrictLoader.construct_number)


def _yaml(text: str, source: str) -> Any:
    help_text = f"write a mapping with the keys {_known_keys()}"
    try:
        return yaml.load(text, _StrictLoader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f" in line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{source}: not valid YAML{place} ({problem}); {help_text}") from None
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # What PyYAML's constructors raise on a tag that does not fit its value.
        raise ConfigError(f"{source}: not valid YAML ({error}); {help_text}") from None


def _known_keys() -> str:
    return ", ".join(PacerConfig.model_fields)


def _unknown_key(key: object) -> str:
    near = difflib.get_close_matches(str(key), PacerConfig.model_fields, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {_known_keys()}"
    return f"unknown key {_shown(key)}; {hint}"


def _explain(error: ValidationError, source: str, context: str | None) -> str:
    problems = []
    for each in error.errors():
        place = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ")
        if context == _AS_TEXT:
            for in_python, written in _AS_WRITTEN.items():
                message = message.replace(in_python, written)
        problems.append(f"{place}: {message}" if place else message)
    return f"{source}: " + "; ".join(problems)
