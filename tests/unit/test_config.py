"""Bad settings are refused with a message that helps; good ones become exact fractions."""

import json
import pickle
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from pydantic import ValidationError

from vllm_pacer.config import (
    ConfigError,
    PacerConfig,
    check_user_name,
    config_from_file,
    config_from_flags,
    format_rate,
    make_config,
)
from vllm_pacer.quota import DEFAULT_BURST_NS, Quota

DEFAULT_FLAG = "--default-user-output-tokens-per-second"
USERS_FLAG = "--user-output-tokens-per-second"
ALLOWED_RATES = "write a number from 0.001 to 1,000,000,000 (tokens per second), or null"
ALLOWED_IN_PYTHON = ALLOWED_RATES.replace("null", "None")
ALLOWED_BURSTS = "write a number of seconds from 0 to 3600"
ALLOWED_KEYS = "write a mapping with the keys default, users, burst, weights, fairness"

BAD_RATES = {
    "zero": ("0", "0"),
    "negative zero": ("-0", "0"),
    "zero with an exponent": ("0e9", "0E+9"),
    "negative": ("-1", "-1"),
    "below the smallest": ("0.0009", "0.0009"),
    "above the largest": ("1000000001", "1000000001"),
    "NaN": ("NaN", "'NaN'"),
    "infinite": ("Infinity", "'Infinity'"),
    "negative infinite": ("-Infinity", "'-Infinity'"),
    "text": ('"100"', "'100'"),
    "boolean": ("true", "true"),
    "list": ("[100]", "[100]"),
    "mapping": ("{}", "{}"),
    "huge": ("1e99", "1E+99"),
    "huge exponent": ("1e999999999", "'1e999999999'"),
    "huge negative exponent": ("1e-999999999", "'1e-999999999'"),
    "exponent beyond decimal's": ("1e99999999999999999999", "'1e99999999999999999999'"),
    "thousands of digits": ("9" * 5000, f"'{'9' * 99}..."),
    "thousands of decimals": ("0." + "3" * 5000, f"'0.{'3' * 97}..."),
}


def message_of(function: object, *args: object) -> str:
    """Return the message of the `ConfigError` that a call raises."""
    with pytest.raises(ConfigError) as caught:
        function(*args)  # type: ignore[operator]
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path):
    """A function that writes a limits file and returns its path."""

    def write_file(text: str | bytes, suffix: str = ".yaml") -> Path:
        path = tmp_path / f"limits{suffix}"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


# --- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "given"), BAD_RATES.values(), ids=BAD_RATES)
def test_bad_default_flag(text: str, given: str) -> None:
    """A default that is no usable rate is refused, naming flag, value, range and `null`."""
    message = message_of(config_from_flags, text, None, None)
    assert message.startswith(f"{DEFAULT_FLAG}: default: got {given}; {ALLOWED_RATES}")


@pytest.mark.parametrize(("text", "given"), BAD_RATES.values(), ids=BAD_RATES)
def test_bad_rate_of_a_user(text: str, given: str) -> None:
    """The same for a named user, whom the message names."""
    message = message_of(config_from_flags, "10", f'{{"user-a": {text}}}', None)
    assert message.startswith(f"{USERS_FLAG}: users.user-a: got {given}; {ALLOWED_RATES}")


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1.0,
        float("nan"),
        float("inf"),
        5e-324,
        1e300,
        10**5000,
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("Infinity"),
        Decimal("1e999999999"),
        Decimal("1e-999999999"),
        Fraction(-1, 3),
        True,
        "100",
        b"100",
        1j,
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_rate_from_python(value: object) -> None:
    """Whatever Python passes for a rate, the answer is `ConfigError` with what is allowed."""
    message = message_of(make_config, {"default": value}, "llm_kwargs")
    assert message.startswith("llm_kwargs: default: got ")
    assert ALLOWED_IN_PYTHON in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("settings", "in_python", "in_text"),
    [
        ({"default": "x"}, "or None for no limit", "or null for no limit"),
        ({"default": 1, "users": {"a": 0}}, "or None for no limit", "or null for no limit"),
        ({"default": 1, "users": []}, '"user-b": None}', '"user-b": null}'),
        ({"users": {}}, "or None for no limit", "or null for no limit"),
        ({"default": 1, "fairness": 2}, "write True or False", "write on or off"),
    ],
)
def test_hints_are_in_the_language_of_the_settings(
    settings: dict[str, object], in_python: str, in_text: str, write
) -> None:
    """What a message says to write can be written where the setting was: Python, or a file."""
    with pytest.raises(ValidationError) as caught:
        PacerConfig(**settings)
    for message in (str(caught.value), message_of(make_config, settings, "llm_kwargs")):
        assert in_python in message
        assert in_text not in message
    for suffix in (".json", ".yaml"):
        message = message_of(config_from_file, write(json.dumps(settings), suffix))
        assert in_text in message
        assert in_python not in message


def test_all_bad_rates_are_named_at_once() -> None:
    """Somebody with two mistakes does not have to start the server twice to learn of both."""
    message = message_of(config_from_flags, "10", '{"a": 0, "b": 1, "c": -5}', None)
    assert "users.a: got 0;" in message
    assert "users.c: got -5;" in message
    assert "users.b" not in message


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100", Fraction(100)),
        ("0.5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("0.001", Fraction(1, 1000)),
        ("1e9", Fraction(10**9)),
        ("2.5E1", Fraction(25)),
        ("0.3333333333333333333333333333", Fraction("0.3333333333333333333333333333")),
        ("null", None),
    ],
)
def test_good_rates_are_exact(text: str, rate: Fraction | None, write) -> None:
    """A rate is the very decimal that was written, by flag, JSON file and YAML file alike."""
    assert config_from_flags(text, None, None).default == rate
    assert config_from_file(write(f'{{"default": {text}}}', ".json")).default == rate
    assert config_from_file(write(f"default: {text}\n")).default == rate


def test_floats_from_python_mean_their_decimal() -> None:
    """0.1 passed as a float is one tenth, not the binary fraction next to it."""
    config = make_config({"default": 0.1, "users": {"a": 0.3}, "burst": 0.7}, "llm_kwargs")
    assert config.default == Fraction(1, 10)
    assert config.users == {"a": Fraction(3, 10)}
    assert config.burst == Fraction(7, 10)


def test_a_float_of_another_library_is_a_float() -> None:
    """A subclass that writes itself in another way, like NumPy's, means the same number."""

    class Other(float):
        def __repr__(self) -> str:
            return f"other.float64({float(self)!r})"

    assert make_config({"default": Other(0.1)}, "llm_kwargs").default == Fraction(1, 10)


# --- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "12abc", "1_000", "0x10", "100 200", "'1'", "[" * 9999])
def test_broken_json_in_a_flag(text: str) -> None:
    """Text that is not JSON is shown, at a bounded length, with what to write instead."""
    message = message_of(config_from_flags, text, None, None)
    assert message.startswith(f"{DEFAULT_FLAG}: got {text!r}"[:90])
    assert "not valid JSON" in message
    assert ALLOWED_RATES in message
    message = message_of(config_from_flags, "10", "{" + text, None)
    assert "not valid JSON" in message
    assert """write for example '{"user-a": 100, "user-b": null}'""" in message
    assert len(message) < 500


@pytest.mark.parametrize("text", ["[]", "3", "null", '"a"', '[["a", 1]]'])
def test_users_that_are_no_mapping(text: str) -> None:
    """Users given as anything but an object are refused with an example of one."""
    message = message_of(config_from_flags, "10", text, None)
    assert message.startswith(f"{USERS_FLAG}: users: got ")
    assert '{"user-a": 100, "user-b": null}' in message


def test_duplicate_users_in_a_flag() -> None:
    """A user given twice is refused; JSON would silently drop the first."""
    message = message_of(config_from_flags, "10", '{"user-a": 1, "user-a": 2}', None)
    assert message == f"{USERS_FLAG}: 'user-a' is given twice; keep one of the two"


def test_users_without_a_default() -> None:
    """Users named without a default: the message offers a default, or null for no limit."""
    message = message_of(config_from_flags, None, '{"user-a": 1}', None)
    assert USERS_FLAG in message
    assert f"{DEFAULT_FLAG} is missing" in message
    assert "give a default for everybody else, or null for no limit" in message


@pytest.mark.parametrize(("default", "users"), [("10", None), (None, "{}"), ("null", "{}")])
def test_file_combined_with_flags(default: str | None, users: str | None) -> None:
    """A file beside a flag is refused, even where the file does not exist."""
    message = message_of(config_from_flags, default, users, "/nonexistent")
    assert "--user-output-rate-config cannot be combined with" in message
    assert "put all limits into the file, or none" in message


def test_good_flags(write) -> None:
    """The flags give default, users and the default burst; the file flag reads the file."""
    config = config_from_flags("100", '{"user-a": 0.5, "user-b": null}', None)
    assert config.default == 100
    assert config.users == {"user-a": Fraction(1, 2), "user-b": None}
    assert config.burst == Fraction(1, 10)
    path = write("default: 100\nusers: {user-a: 0.5, user-b: null}\n")
    assert config_from_flags(None, None, str(path)) == config


# --- user names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (7, "must be a string, got 7; write it in quotes"),
        (None, "must be a string, got None; write it in quotes"),
        (True, "must be a string, got True; write it in quotes"),
        (b"a", "must be a string, got b'a'; write it in quotes"),
        ("", "must not be empty"),
        ("x" * 257, "must have at most 256 characters, got 257"),
        ("a\nb", r"must not contain '\n', got 'a\nb'; leave out control characters, line breaks"),
        ("\x00", r"must not contain '\x00', got '\x00'; leave out control"),
        ("a\x1b[2J", r"must not contain '\x1b', got 'a\x1b[2J'; leave out control"),
        ("a\x7f", r"must not contain '\x7f', got"),
        ("a\x85", r"must not contain '\x85', got"),
        ("a\u2028", r"must not contain '\u2028', got"),
        ("a\u2029", r"must not contain '\u2029', got"),
        ("a\ud800", r"must not contain '\ud800', got 'a\ud800'; leave out control"),
        ("\udfff" * 256, r"must not contain '\udfff', got '\udfff\udfff"),
    ],
)
def test_bad_user_names(name: object, reason: str) -> None:
    """A name that cannot name a user is refused, in a request as in the settings."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        check_user_name(name)
    message = message_of(make_config, {"default": 1, "users": {name: 1}}, "file")
    assert message.startswith(f"file: users: a user's name {reason}")
    assert message.isprintable()
    assert len(message) < 300
    assert message_of(make_config, {"default": 1, "weights": {name: 1}}, "file").startswith(
        f"file: weights: a user's name {reason}"
    )


@pytest.mark.parametrize(
    "name", ["a", "x" * 256, "Zoë 🚀", "👩\u200d💻", "a\u00a0b", "a.b", "1", "__anonymous__"]
)
def test_good_user_names(name: str) -> None:
    """Every text of 1 to 256 characters that a line of a log can show names a user."""
    assert check_user_name(name) == name
    assert config_from_flags("1", json.dumps({name: 2}), None).users == {name: 2}


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", f"got nothing; {ALLOWED_KEYS}"),
        ("# only a comment\n", f"got nothing; {ALLOWED_KEYS}"),
        ("- 1\n- 2\n", f"got [1, 2]; {ALLOWED_KEYS}"),
        ("just text", f"got 'just text'; {ALLOWED_KEYS}"),
        ("users: {a: 1}", "no default is given; add one for the users that are not named, or null"),
        ("defualt: 3", "unknown key 'defualt'; did you mean 'default'?"),
        ("default: 3\nbusrt: 1", "unknown key 'busrt'; did you mean 'burst'?"),
        ("default: 3\nuser: {a: 1}", "unknown key 'user'; did you mean 'users'?"),
        ("default: 3\nzzz: 1", "unknown key 'zzz'; the keys are default, users, burst"),
        ("default: 3\n7: 1", "unknown key 7; the keys are default, users, burst"),
        ("default: 3\ndefault: 4", "line 2: 'default' is given twice; keep one of the two"),
        ("default: 3\nusers:\n  a: 1\n  a: 2", "line 4: 'a' is given twice; keep one of the two"),
        ("default: 3\nusers: {a: 1, 'a': 2}", "line 2: 'a' is given twice; keep one of the two"),
        ("default: 3\nusers:\n  1: 2", "users: a user's name must be a string, got 1; write it in"),
        ("default: 3\nusers:\n  no: 2", "users: a user's name must be a string, got false; write"),
        (
            "default: 3\nusers: null",
            "users: got null; write a mapping from user to tokens per second",
        ),
        ("default: 3\nburst: -1", f"burst: got -1; {ALLOWED_BURSTS}"),
        ("default: 3\nburst: 3600.5", f"burst: got 3600.5; {ALLOWED_BURSTS}"),
        ("default: 3\nburst: true", f"burst: got true; {ALLOWED_BURSTS}"),
        ("default: 3\nburst: null", f"burst: got null; {ALLOWED_BURSTS}"),
        ("default: 3\nburst: 1e-999999999", f"burst: got '1e-999999999'; {ALLOWED_BURSTS}"),
        ("default: .nan", f"default: got '.nan'; {ALLOWED_RATES}"),
        ("default: .inf", f"default: got '.inf'; {ALLOWED_RATES}"),
        ("default: yes", f"default: got true; {ALLOWED_RATES}"),
        ("default: 2024-01-01", f"default: got datetime.date(2024, 1, 1); {ALLOWED_RATES}"),
        ("default: 1e999999999", f"default: got '1e999999999'; {ALLOWED_RATES}"),
        ("\tdefault: 1", "not valid YAML in line 1 (found character '\\t'"),
        ("default: 1\nusers: {a", "not valid YAML in line 2 ("),
        ("default: 1\n---\ndefault: 2", "not valid YAML in line 2 (but found another document)"),
        ("default: !!python/name:os.system x", "not valid YAML in line 1 ("),
        ("default: &a [*a]", "not valid YAML in line 1 (found unconstructable recursive node)"),
        ("? [1]\n: 2", "line 1: a key must be text; write it in quotes"),
        ("default: !!bool x", "not valid YAML ("),
        ("default: !!timestamp x", "not valid YAML ("),
        ("!!map [1]", "not valid YAML ("),
        ("[" * 1000, "not valid YAML ("),
    ],
)
def test_bad_yaml(text: str, reason: str, write) -> None:
    """A bad YAML file is refused, naming the file, what is wrong and what to write."""
    path = write(text)
    message = message_of(config_from_file, path)
    assert message.startswith(f"{path}: {reason}")
    if "not valid YAML" in message:
        assert message.endswith(ALLOWED_KEYS)


@pytest.mark.parametrize("text", ["010", "1:30", "1_000", "0x10", "0b1", ".5", "+5", "1."])
def test_numbers_that_only_yaml_1_1_knows(text: str, write) -> None:
    """Octal, sexagesimal and other surprises of YAML 1.1 are refused, not misread."""
    message = message_of(config_from_file, write(f"default: {text}"))
    assert f"default: got {text!r}; {ALLOWED_RATES}" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "got '', which is not valid JSON: "),
        ("{", "got '{', which is not valid JSON: "),
        ("default: 1", "got 'default: 1', which is not valid JSON: "),
        ("[]", f"got []; {ALLOWED_KEYS}"),
        ('{"users": {"a": 1}}', "no default is given; add one"),
        ('{"default": 1, "default": 2}', "'default' is given twice; keep one of the two"),
        ('{"default": 1, "users": {"a": 1, "a": 2}}', "'a' is given twice; keep one of the two"),
        ('{"default": 1e-999999999}', f"default: got '1e-999999999'; {ALLOWED_RATES}"),
    ],
)
def test_bad_json_file(text: str, reason: str, write) -> None:
    """A bad JSON file is refused in the same way."""
    path = write(text, ".json")
    message = message_of(config_from_file, path)
    assert message.startswith(f"{path}: {reason}")


def test_the_message_about_a_large_broken_file_is_short(write) -> None:
    """A megabyte of broken JSON does not end up in the log."""
    message = message_of(config_from_file, write('{"default": 1,' + " " * 1_000_000, ".json"))
    assert "not valid JSON" in message
    assert len(message) < 500


@pytest.mark.parametrize("path", ["/nonexistent/limits.yaml", "", "a\0b"])
def test_unusable_path(path: str) -> None:
    """A path that cannot be read is named, with what to give instead."""
    message = message_of(config_from_file, path)
    assert message.startswith(f"cannot read {path!r}: ")
    assert "give the path of a YAML or JSON file that the server may read" in message


def test_directory_instead_of_a_file(tmp_path: Path) -> None:
    """A directory is refused as such."""
    message = message_of(config_from_file, tmp_path)
    assert f"cannot read {str(tmp_path)!r}: Is a directory; give the path of" in message


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_file_that_is_not_utf_8(suffix: str, write) -> None:
    """Bytes that are not UTF-8 are refused as unreadable."""
    assert "cannot read" in message_of(config_from_file, write(b"\xff\xfe\x00", suffix))


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".yaml", "default: 0.1\nburst: 0\nusers:\n  a: 0.3\n  b: null\n  '1': 1e3\n"),
        (".yml", '{"default": 0.1, "burst": 0, "users": {"a": 0.3, "b": null, "1": 1e3}}'),
        (".json", '{"default": 0.1, "burst": 0, "users": {"a": 0.3, "b": null, "1": 1e3}}'),
        (".json", '\ufeff{"default": 0.1, "burst": 0, "users": {"a":0.3,"b":null,"1":1000}}'),
    ],
)
def test_good_file(suffix: str, text: str, write) -> None:
    """A file gives exact fractions; JSON is YAML too, and a byte order mark does no harm."""
    config = config_from_file(write(text, suffix))
    assert config.default == Fraction(1, 10)
    assert config.burst == 0
    assert config.users == {"a": Fraction(3, 10), "b": None, "1": Fraction(1000)}


# --- the object ----------------------------------------------------------------------------------


def test_quotas_from_the_configuration() -> None:
    """Quotas have the configured rates and burst; users of one rate share one object."""
    quotas = make_config(
        {"default": 0.1, "users": {"a": 20, "b": None, "c": 20}, "burst": 0.25}, "file"
    ).quotas()
    assert quotas.of("anybody") == Quota(Fraction(1, 10), 250_000_000)
    assert quotas.of("a") == Quota(Fraction(20), 250_000_000)
    assert quotas.of("b") is None
    assert quotas.of("c") is quotas.of("a")


def test_no_limit_by_default_and_a_limit_for_one() -> None:
    """`null` as the default leaves everybody but the named users unlimited."""
    quotas = config_from_flags("null", '{"a": 20}', None).quotas()
    assert quotas.of("anybody") is None
    assert quotas.of("a") == Quota(Fraction(20))


@pytest.mark.parametrize(
    ("burst", "burst_ns"),
    [(0, 0), (0.1, DEFAULT_BURST_NS), (1e-9, 1), (1.9e-9, 1), (3600, 3600 * 10**9)],
)
def test_burst_is_rounded_down_to_nanoseconds(burst: float, burst_ns: int) -> None:
    """Part of a nanosecond of burst is dropped: rounding up would break the bound."""
    quota = make_config({"default": 1, "burst": burst}, "file").quotas().of("a")
    assert quota is not None
    assert quota.burst_ns == burst_ns


def test_the_default_burst_is_the_same_everywhere() -> None:
    """Configuration and quota have the same default burst of 100 ms."""
    assert PacerConfig(default=1).quotas().default == Quota.per_second(1)
    assert DEFAULT_BURST_NS == 100_000_000


def test_frozen_and_picklable() -> None:
    """The configuration cannot be changed, and reaches the engine's process as it is."""
    config = make_config({"default": 0.1, "users": {"a": 0.3, "b": None}}, "file")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.default = None  # type: ignore[misc]


def test_description_is_one_line() -> None:
    """The line for the log names up to eight users and counts more."""
    config = make_config({"default": Fraction(1, 3), "users": {"a": None, "b": 1e9}}, "file")
    assert config.describe() == (
        "default 0.333333333333333 tokens/s, burst 0.1 s, a: no limit, b: 1000000000 tokens/s"
    )
    config = make_config({"default": None, "users": dict.fromkeys("abcdefgh", 1) | {"i": None}}, "")
    assert config.describe() == "default no limit, burst 0.1 s, 9 users named, 8 of them limited"
    assert format_rate(Fraction("0.001")) == "0.001 tokens/s"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weights: {a: 0}", "weights: got 0; write a number from 0.001 to 1,000"),
        ("weights: {a: heavy}", "got 'heavy'; write a number from 0.001 to 1,000"),
        ("weights: {a: null}", "got null; write a number from 0.001 to 1,000"),
        ("weights: [a]", "weights: got ['a']; write a mapping from user to weight"),
        ("weights: {'': 1}", "a user's name must not be empty"),
        ("fairness: sometimes", "fairness: got 'sometimes'; write on or off"),
        ("fairness: 1", "fairness: got 1; write on or off"),
    ],
)
def test_bad_sharing(text: str, expected: str, tmp_path: Path) -> None:
    """A weight or a switch that cannot be used is named, with what is allowed."""
    path = tmp_path / "limits.yaml"
    path.write_text(f"default: 1\n{text}\n")
    with pytest.raises(ConfigError) as error:
        config_from_file(path)
    assert expected.partition(": ")[2] in str(error.value)


@pytest.mark.parametrize(("written", "is_on"), [("on", True), ("off", False), ("'off'", False)])
def test_sharing(written: str, is_on: bool, tmp_path: Path) -> None:
    """Weights are exact, and sharing is on or off as it is written."""
    path = tmp_path / "limits.yaml"
    path.write_text(f"default: 1\nweights: {{a: 0.5, b: 4}}\nfairness: {written}\n")
    config = config_from_file(path)
    assert config.weights == {"a": Fraction(1, 2), "b": Fraction(4)}
    assert config.fairness is is_on
    assert "2 weights" in config.describe()
    assert ("fairness off" in config.describe()) is not is_on


NO_WEIGHTS = "weights have no effect while fairness is off"


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        ({"default": 1}, []),
        ({"default": 1, "weights": {"a": 2}}, []),
        ({"default": 1, "fairness": False}, []),
        ({"default": 1, "weights": {"a": 2}, "fairness": False}, [NO_WEIGHTS]),
        ({"default": 1, "burst": 0.001}, []),
        ({"default": 1, "burst": 0.0009}, ["a burst of 0.0009 s is shorter than any step"]),
        ({"default": 1, "burst": 0}, ["a burst of 0 s is shorter than any step"]),
        ({"default": None, "burst": 0}, []),
        ({"default": None, "burst": 0, "users": {"a": None}}, []),
        ({"default": None, "burst": 0, "users": {"a": 1}}, ["a burst of 0 s is shorter"]),
        (
            {"default": 1, "burst": 0, "weights": {"a": 2}, "fairness": False},
            [NO_WEIGHTS, "a burst of 0 s"],
        ),
    ],
)
def test_warnings(settings: dict[str, object], starts: list[str]) -> None:
    """Settings that have no effect, or not the one that is meant, are named; no others are."""
    warnings = PacerConfig(**settings).warnings()
    assert len(warnings) == len(starts)
    for warning, start in zip(warnings, starts, strict=True):
        assert warning.startswith(start)
        assert "; " in warning  # and what to write instead


@pytest.mark.parametrize(
    "text",
    [
        "default:\n",
        "default: 1\nusers: {a:20}\n",
        "default: 1\nusers: {a:100, b: 5}\n",
        "default: 1\nusers:\n  a:\n  b: 3\n",
        "default: 1\nusers: {a: 1, b: }\n",
        "default: 1\nburst:\n",
    ],
)
def test_a_value_left_out_is_no_limit_taken_away(text: str, tmp_path: Path) -> None:
    """A key without a value, or without the space that YAML wants, is refused and not unlimited."""
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"line \d: a key without a value; .* or null for no limit"
    ):
        config_from_file(path)
