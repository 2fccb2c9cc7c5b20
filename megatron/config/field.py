"""The one way to declare a setting: a dataclass field that also carries its flag and its help."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_METADATA_KEY = "setting"


@dataclass(frozen=True)
class Setting:
    """What a field knows about itself besides its type and default.

    Attributes:
        help: One sentence for ``--help`` and ``docs/flags.md``.
        flags: Spellings on the command line that set the field (for a boolean: to ``not default``).
        choices: The allowed values; empty when any value of the type will do.
        units: The unit of a number, e.g. ``minutes``.
        nargs: ``"*"`` for a list of values.
        derived: True when only ``finalize`` sets the field; such a field has no flag.
        fallback: What a ``None`` default becomes, in words, for the documentation.
        aliases: Accepted spellings of values, e.g. ``{"local": "native"}``.
    """

    help: str
    flags: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    units: str = ""
    nargs: str = ""
    derived: bool = False
    fallback: str = ""
    aliases: tuple[tuple[str, str], ...] = ()


def field(
    default: Any = None,
    *,
    help: str,
    flags: str | Iterable[str] = (),
    choices: Iterable[Any] = (),
    units: str = "",
    nargs: str = "",
    derived: bool = False,
    fallback: str = "",
    aliases: dict[str, str] | None = None,
) -> Any:
    """Declare a dataclass field together with everything the command line and the docs need.

    Args:
        default: The value when nobody sets it. Must be immutable.
        help: One sentence, ending with a full stop.
        flags: Flag or flags; the default is the field name with dashes.
        choices: The allowed values.
        units: The unit of a number.
        nargs: ``"*"`` for a list of values (the field's type is then a tuple).
        derived: True when only ``finalize`` sets the field.
        fallback: What a ``None`` default becomes, in words.
        aliases: Accepted spellings of values.

    Returns:
        A ``dataclasses.field``.
    """
    setting = Setting(
        help=help,
        flags=(flags,) if isinstance(flags, str) else tuple(flags),
        choices=tuple(choices),
        units=units,
        nargs=nargs,
        derived=derived,
        fallback=fallback,
        aliases=tuple((aliases or {}).items()),
    )
    return dataclasses.field(default=default, metadata={_METADATA_KEY: setting})


@dataclass(frozen=True)
class Spec:
    """A declared field, resolved: name, type and setting.

    Attributes:
        name: Field name, YAML key and (with dashes) flag name.
        section: The section that holds it, e.g. ``model``.
        kind: ``int``, ``float``, ``str`` or ``bool`` (the element type of a list).
        optional: True when ``None`` is a legal value.
        default: The default value.
        setting: Help, flags, choices and so on.
    """

    name: str
    section: str
    kind: type
    optional: bool
    default: Any
    setting: Setting

    @property
    def flags(self) -> tuple[str, ...]:
        """The documented spellings on the command line."""
        if self.setting.derived:
            return ()
        return self.setting.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def flag(self) -> str:
        """The first spelling, used in messages; a derived field is named as it is."""
        return self.flags[0] if self.flags else self.name

    @property
    def inverse_flags(self) -> tuple[str, ...]:
        """For a boolean: the spellings that set it back to its default (they undo a YAML file)."""
        if self.kind is not bool or self.setting.derived:
            return ()
        dashed = self.name.replace("_", "-")
        if self.default:
            return (f"--{dashed}",)
        return (f"--{dashed[3:]}",) if dashed.startswith("no-") else (f"--no-{dashed}",)

    @property
    def many(self) -> bool:
        """True when the field holds a tuple of values."""
        return self.setting.nargs == "*"


def specs_of(section: str, cls: type) -> list[Spec]:
    """List the declared fields of a section dataclass.

    Args:
        section: The section's name.
        cls: The section's dataclass.

    Returns:
        One :class:`Spec` a field, in declaration order.

    Raises:
        TypeError: A field was declared without :func:`field`.
    """
    hints = typing.get_type_hints(cls)
    specs = []
    for item in dataclasses.fields(cls):
        setting = item.metadata.get(_METADATA_KEY)
        if setting is None:
            raise TypeError(f"{cls.__name__}.{item.name} is not declared with field()")
        members = [t for t in typing.get_args(hints[item.name]) if t is not type(None)]
        optional = type(None) in typing.get_args(hints[item.name])
        if not members:
            members = [hints[item.name]]
        kind = members[0]
        if typing.get_origin(kind) is tuple:
            kind = typing.get_args(kind)[0]
        specs.append(Spec(item.name, section, kind, optional, item.default, setting))
    return specs
