"""What `--fp8-policy` may hold: rules that choose the precision of single linear layers.

The first rule that fits a layer decides. A layer that no rule fits runs as the other flags say, and
`--first-last-layers-bf16` comes before every rule. Experts of one matrix are one layer here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron.config.fp8 import recipe_of
from megatron.config.moe import moe_layers
from megatron.config.problems import Problem
from megatron.config.schema import SPECS
from megatron.config.values import nearest
from megatron.config.yaml_text import read_text

FLAG = "--fp8-policy"
PLAIN = "bf16"
ATTENTION = "core_attention"
GEMMS = ("fprop", "dgrad", "wgrad")
KEYS = ("module", "layers", "recipe", "format", *GEMMS, "reason")
EXAMPLE = 'Write rules such as `- {module: "*.mlp.linear_fc2", recipe: bf16}` below `rules:`'
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


def recipes() -> tuple[str, ...]:
    """Every recipe that a rule may name."""
    return (*SPECS["fp8_recipe"].setting.choices, *SPECS["fp4_recipe"].setting.choices)


def formats() -> tuple[str, ...]:
    """Every format that a rule may name."""
    return SPECS["fp8_format"].setting.choices


@dataclass(frozen=True)
class PolicyRule:
    """One rule.

    Attributes:
        number: Its place in the file, from 1.
        modules: Globs of module paths, of which one has to fit; `*` fits dots too.
        layers: Spans of transformer layers, counted from 0, both ends included; empty for all.
        recipe: Name of the recipe, `bf16`, or None for the run's own.
        fp8_format: `e4m3` or `hybrid`; None for the run's own.
        gemms: By product, whether it runs in FP8; what is not named follows the run.
        note: Why the rule is there, in the words of who wrote it.
    """

    number: int
    modules: tuple[str, ...] = ("*",)
    layers: tuple[tuple[int, int], ...] = ()
    recipe: str | None = None
    fp8_format: str | None = None
    gemms: tuple[tuple[str, bool], ...] = ()
    note: str = ""

    def fits(self, path: str) -> bool:
        """Whether the rule speaks of a layer."""
        return self._fits_number(path) and any(fnmatchcase(path, one) for one in self.modules)

    def _fits_number(self, path: str) -> bool:
        if not self.layers:
            return True
        found = _LAYER.search(path)
        return found is not None and any(a <= int(found[1]) <= b for a, b in self.layers)

    @property
    def label(self) -> str:
        """The rule in the precision table."""
        which = [] if self.modules == ("*",) else [" ".join(self.modules)]
        if self.layers:
            which.append(f"layers {spans_text(self.layers)}")
        note = f"; {self.note}" if self.note else ""
        return f"{FLAG} rule {self.number}: {', '.join(which) or '*'}{note}"


def spans_text(spans: Sequence[tuple[int, int]]) -> str:
    """Write spans of layers as they are read, `0-3,10`."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


# -- reading --------------------------------------------------------------------------------------


def load(value: str) -> str:
    """Return the text of a policy.

    Args:
        value: The path of a file, or the text itself, which has a line break.

    Raises:
        ValueError: The file cannot be read; says why.
    """
    if "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8") + "\n"
    except OSError as error:
        raise ValueError(f"It cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"It is no text: {error}") from None


def place(value: str) -> str:
    """Name a policy in messages."""
    return "the rules given as text" if "\n" in value else value


@dataclass(frozen=True)
class Policy:
    """A policy as it was read.

    Attributes:
        rules: Those that can be understood.
        faults: (what was there, why it cannot work, what to do) for the rest.
    """

    rules: tuple[PolicyRule, ...] = ()
    faults: tuple[tuple[str, str, str], ...] = ()


@lru_cache(maxsize=8)
def read(text: str | None) -> Policy:
    """Read a policy; None has no rules."""
    if text is None:
        return Policy()
    try:
        content = read_text(text)
    except ValueError as error:
        fix = "Correct it; a pattern that begins with * stands in quotes"
        return Policy(faults=(("", str(error), fix),))
    if not isinstance(content, dict) or "rules" not in content:
        return Policy(faults=((_kind(content), "A policy maps `rules` to a list", EXAMPLE),))
    faults = [
        (f"{key}", "A policy has no such entry", "Keep `rules` alone") for key in content
        if key != "rules"
    ]  # fmt: skip
    listed = content["rules"]
    if not isinstance(listed, list) or not listed:
        return Policy(faults=(*faults, (f"rules: {listed}", "It is a list of rules", EXAMPLE)))
    rules = []
    for number, entry in enumerate(listed, 1):
        found = list(_entry_faults(entry))
        faults += [(f"rule {number}: {got}", why, fix) for got, why, fix in found]
        if not found:
            rules.append(_rule(number, entry))
    return Policy(tuple(rules), tuple(faults))


def _kind(content: Any) -> str:
    return "nothing" if content is None else f"a {type(content).__name__}"


def _entry_faults(entry: Any) -> Iterator[tuple[str, str, str]]:
    """Say what is wrong with one rule by itself."""
    if not isinstance(entry, dict):
        yield f"{entry}", "A rule maps names to values", EXAMPLE
        return
    for key, value in entry.items():
        if key not in KEYS:
            guess = nearest(str(key), KEYS)
            fix = f"Did you mean {guess}?" if guess else f"Use {', '.join(KEYS)}"
            yield f"{key}: {value}", "A rule has no such entry", fix
        elif (fault := _CHECKS[key](value)) is not None:
            yield f"{key}: {value}", *fault
    if set(entry) - set(KEYS):
        return  # a misspelt name is no missing one
    if not {"module", "layers"} & set(entry):
        yield "neither module nor layers", "A rule says which layers it is for", EXAMPLE
    if not {"recipe", "format", *GEMMS} & set(entry):
        why = "A rule says how its layers run"
        yield "no recipe", why, f"Add `recipe: {PLAIN}`, or a recipe, a format or a product"
    yield from _contradictions(entry)


def _contradictions(entry: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    told = {key: entry[key] for key in ("format", *GEMMS) if key in entry}
    if entry.get("recipe") == PLAIN and told:
        shown = ", ".join(f"{key}: {value}" for key, value in told.items())
        yield f"recipe: {PLAIN} with {shown}", "Nothing of the layer is in FP8", f"Remove {shown}"
    elif all(entry.get(gemm) == PLAIN for gemm in GEMMS):
        yield f"all products {PLAIN}", "Nothing of the layer is in FP8", f"Write `recipe: {PLAIN}`"


Fault = tuple[str, str]


def _one_of(value: Any, choices: Sequence[str]) -> Fault | None:
    if value in choices:
        return None
    guess = nearest(str(value), choices)
    why = f"The choices are {', '.join(choices)}"
    return why, f"Did you mean {guess}?" if guess else "Give one of these"


def _check_modules(value: Any) -> Fault | None:
    names = value if isinstance(value, list) else [value]
    if names and all(isinstance(name, str) and name for name in names):
        return None
    return "It is a pattern of module paths, or a list of them", 'Write `module: "*.linear_fc2"`'


def _check_layers(value: Any) -> Fault | None:
    try:
        _spans(value)
    except ValueError:
        return "It is a list of layers and spans, counted from 0", "Write `layers: 0-3,10`"
    return None


def _check_reason(value: Any) -> Fault | None:
    if isinstance(value, str) and value.strip():
        return None
    return "It is text for the precision table", "Write it in quotes, or leave it out"


_CHECKS: dict[str, Callable[[Any], Fault | None]] = {
    "module": _check_modules,
    "layers": _check_layers,
    "recipe": lambda value: _one_of(value, (*recipes(), PLAIN)),
    "format": lambda value: _one_of(value, formats()),
    **{gemm: lambda value: _one_of(value, ("fp8", PLAIN)) for gemm in GEMMS},
    "reason": _check_reason,
}


def _spans(value: Any) -> tuple[tuple[int, int], ...]:
    """Read `layers`: a number, `0-3,10`, or a list of these.

    Raises:
        ValueError: It is none of them.
    """
    if isinstance(value, bool) or not isinstance(value, int | str | list) or value in ("", []):
        raise ValueError
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int | str) and not isinstance(item, bool) for item in items):
        raise ValueError
    spans = []
    for word in ",".join(str(item) for item in items).split(","):
        found = _SPAN.fullmatch(word.strip())
        if found is None:
            raise ValueError
        first = int(found[1])
        last = first if found[2] is None else int(found[2])
        if last < first:
            raise ValueError
        spans.append((first, last))
    return tuple(spans)


def _rule(number: int, entry: dict[str, Any]) -> PolicyRule:
    modules = entry.get("module", "*")
    return PolicyRule(
        number,
        tuple(modules) if isinstance(modules, list) else (modules,),
        _spans(entry["layers"]) if "layers" in entry else (),
        entry.get("recipe"),
        entry.get("format"),
        tuple((gemm, entry[gemm] == "fp8") for gemm in GEMMS if gemm in entry),
        " ".join(entry.get("reason", "").split()),
    )


# -- the layers of a model ------------------------------------------------------------------------


def fp8_paths(c: Any) -> list[str]:
    """Paths of what FP8 is for: linear layers, experts of one matrix as one, and FP8 attention.

    Args:
        c: Anything with the settings' names, of which the model's can be read.
    """
    paths = []
    attention = ["linear_qkv", "linear_proj"]
    if c.fp8_dot_product_attention:
        attention.insert(1, ATTENTION)
    for number, has_experts in enumerate(moe_layers(c)):
        layer = f"decoder.layers.{number}"
        paths += [f"{layer}.self_attention.{name}" for name in attention]
        mlps = ["mlp"]
        if has_experts:
            mlps = ["mlp.experts"]
            if c.moe_shared_expert_intermediate_size is not None:
                mlps.append("mlp.shared_experts")
        paths += [f"{layer}.{mlp}.{name}" for mlp in mlps for name in ("linear_fc1", "linear_fc2")]
    return paths


def kept_by_edges(c: Any, path: str) -> bool:
    """Whether `--first-last-layers-bf16` keeps a layer out of FP8, whatever the rules say."""
    found = _LAYER.search(path)
    if not c.first_last_layers_bf16 or found is None:
        return False
    number = int(found[1])
    first, last = c.num_layers_at_start_in_bf16, c.num_layers_at_end_in_bf16
    return bool(number < first or number >= c.num_layers - last)


def deciding(rules: Sequence[PolicyRule], path: str) -> PolicyRule | None:
    """The rule that decides a layer, None for the run's own settings."""
    return next((rule for rule in rules if rule.fits(path)), None)


def _policy_of(c: Any) -> Policy:
    return read(c.fp8_policy_text)


def recipes_in_use(c: Any) -> set[str]:
    """Names of the recipes that at least one layer runs in; `bf16` is none.

    Args:
        c: A configuration, finished or not; without FP8 or FP4 there are none.
    """
    own = recipe_of(c)
    if own is None:
        return set()
    rules = _policy_of(c).rules
    if not rules:
        return {own}
    return {recipe for path in _paths_if_known(c) if (recipe := recipe_at(c, rules, path)) != PLAIN}


def hybrid_recipes(c: Any) -> list[str]:
    """Names of the recipes that are used with `hybrid`, in alphabetical order."""
    if recipe_of(c) is None:
        return []
    rules = _policy_of(c).rules
    found = {c.fp8_recipe} if c.fp8_format == "hybrid" and not rules else set()
    for path in _paths_if_known(c) if rules else ():
        rule = deciding(rules, path)
        if ((rule and rule.fp8_format) or c.fp8_format) == "hybrid":
            found.add(recipe_at(c, rules, path))
    return sorted(found - {PLAIN})


def recipe_at(c: Any, rules: Sequence[PolicyRule], path: str) -> str:
    """Name of the recipe that a layer gets, or `bf16`."""
    if kept_by_edges(c, path):
        return PLAIN
    rule = deciding(rules, path)
    return str(recipe_of(c) if rule is None or rule.recipe is None else rule.recipe)


def attention_recipes(c: Any) -> list[str]:
    """Names of the recipes that FP8 attention gets, in alphabetical order; `bf16` is none."""
    rules = _policy_of(c).rules
    paths = [path for path in _paths_if_known(c) if path.endswith(f".{ATTENTION}")]
    return sorted({recipe_at(c, rules, path) for path in paths} - {PLAIN})


def some_layers_plain(c: Any) -> bool:
    """Whether some layers of an FP8 run compute in high precision, always or at first."""
    if c.fp8_warmup_iters:
        return True
    rules = _policy_of(c).rules
    return any(recipe_at(c, rules, path) == PLAIN for path in _paths_if_known(c))


def _paths_if_known(c: Any) -> list[str]:
    """The model's paths; none where another rule says what is wrong with it."""
    try:
        return fp8_paths(c) if isinstance(c.num_layers, int) else []
    except ValueError:
        return []


# -- judging --------------------------------------------------------------------------------------


def problems(c: Any) -> Iterator[Problem]:
    """Say what is wrong with the policy of a configuration, finished or not."""
    if c.fp8_policy_text is None:
        return
    policy, where = _policy_of(c), place(c.fp8_policy)
    for got, why, fix in policy.faults:
        yield Problem((FLAG,), f"{got} in {where}" if got else where, why, fix)
    paths = _paths_if_known(c)
    if policy.faults or not paths:
        return
    open_paths = [path for path in paths if not kept_by_edges(c, path)]
    for rule in policy.rules:
        recipe = rule.recipe or recipe_of(c)
        if rule.fp8_format and recipe in SPECS["fp4_recipe"].setting.choices:
            got = f"rule {rule.number}: format: {rule.fp8_format} with {recipe} in {where}"
            yield Problem((FLAG,), got, f"{recipe} is a recipe of FP4", "Remove the format")
        stray = [one for one in rule.modules if not any(fnmatchcase(p, one) for p in paths)]
        for pattern in stray:
            got = f"rule {rule.number}: module: {pattern} in {where}"
            yield Problem((FLAG,), got, *_no_such_module(pattern, paths))
        if stray:
            continue
        taken = {deciding(policy.rules, path) for path in open_paths if rule.fits(path)}
        own = [path for path in paths if rule.fits(path)]
        if rule.gemms and own and all(path.endswith(f".{ATTENTION}") for path in own):
            got = f"rule {rule.number}: {rule.gemms[0][0]} in {where}"
            why = "Only linear layers have these products"
            fix = "Give attention a recipe or bf16; --no-fp8-dpa-bwd is for its backward products"
            yield Problem((FLAG,), got, why, fix)
        if rule not in taken:
            got = f"rule {rule.number} in {where}"
            yield Problem((FLAG,), got, *_decides_nothing(rule, taken, paths, c.num_layers))


def _no_such_module(pattern: str, paths: Sequence[str]) -> Fault:
    if fnmatchcase("output_layer", pattern):
        return "The output layer is always kept out of FP8", "Remove the rule"
    close = nearest_paths(pattern, paths)
    fix = f"Did you mean {close[0]}?" if close else f"Paths look like {paths[0]}"
    return "The model has no linear layer of this path", fix


def nearest_paths(pattern: str, paths: Sequence[str]) -> list[str]:
    """Paths that resemble a pattern, by layer number if it names one, else with a star for it."""
    names = list(paths)
    if not _LAYER.search(pattern):
        names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", path) for path in paths))
        names += [name.replace("decoder.layers.*", "*", 1) for name in names]
    return difflib.get_close_matches(pattern, names, n=1, cutoff=0.4)


def _decides_nothing(
    rule: PolicyRule, taken: set[PolicyRule | None], paths: Sequence[str], num_layers: int
) -> Fault:
    earlier = sorted(other.number for other in taken if other is not None)
    if earlier:
        numbers = ", ".join(str(number) for number in earlier)
        why = f"It decides nothing: the first rule that fits a layer decides, here {numbers}"
        return why, f"Move it in front of rule {earlier[0]}, or remove it"
    if any(rule.fits(path) for path in paths):
        return (
            "It decides nothing: --first-last-layers-bf16 keeps all of its layers out of FP8",
            "Remove the rule, or keep fewer layers at the ends",
        )
    why = f"No linear layer fits both, and the layers of this model are 0 to {num_layers - 1}"
    return why, f"Correct `layers: {spans_text(rule.layers)}`, or the module"


# -- another number of layers ---------------------------------------------------------------------


def scaled(c: Any, small: Any) -> str | None:
    """The policy of a model for one with fewer layers, as text.

    Layers keep their place in proportion. A rule that then decides nothing is left out.

    Args:
        c: The model's configuration.
        small: The smaller one's, finished or not.

    Returns:
        None if no rule is left.
    """

    def place_of(number: int) -> int:
        return number * int(small.num_layers) // int(c.num_layers)

    paths = _paths_if_known(small)
    rules: list[PolicyRule] = []
    for rule in _policy_of(c).rules:
        layers = tuple((place_of(first), place_of(last)) for first, last in rule.layers)
        names = [_LAYER.sub(lambda m: m[0].replace(m[1], str(place_of(int(m[1])))), name)
                 for name in rule.modules]  # fmt: skip
        fitting = [name for name in names if any(fnmatchcase(path, name) for path in paths)]
        smaller = replace(rule, modules=tuple(dict.fromkeys(fitting)), layers=layers)
        open_paths = [path for path in paths if not kept_by_edges(small, path)]
        if any(smaller.fits(path) and deciding(rules, path) is None for path in open_paths):
            rules.append(smaller)
    return write(rules) if rules else None


# -- writing --------------------------------------------------------------------------------------


def write(rules: Sequence[PolicyRule], comment: str = "") -> str:
    """Return the text of a policy.

    Args:
        rules: At least one, in order; their numbers do not matter.
        comment: Lines for its head.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines.append("rules:")
    for rule in rules:
        entries = list(_entries(rule))
        lines += [f"{'    ' if i else '  - '}{entry}" for i, entry in enumerate(entries)]
    return "\n".join(lines) + "\n"


def _entries(rule: PolicyRule) -> Iterator[str]:
    if rule.modules != ("*",) or not rule.layers:
        quoted = [_quoted(name) for name in rule.modules]
        yield f"module: {quoted[0] if len(quoted) == 1 else '[' + ', '.join(quoted) + ']'}"
    if rule.layers:
        yield f'layers: "{spans_text(rule.layers)}"'
    if rule.recipe:
        yield f"recipe: {rule.recipe}"
    if rule.fp8_format:
        yield f"format: {rule.fp8_format}"
    for gemm, in_fp8 in rule.gemms:
        yield f"{gemm}: {'fp8' if in_fp8 else PLAIN}"
    if rule.note:
        yield f"reason: {_quoted(rule.note)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
