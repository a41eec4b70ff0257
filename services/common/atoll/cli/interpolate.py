"""Fills references in a stack file: `${VAR}` from the environment, `${dotted.path}` from the file itself.

A reference in capitals is an environment variable and may carry a default: `${MODEL:-tiny}`. Anything else is a path in
the same file: `${vars.ports.registry}`. A string that is one path reference and nothing else takes the value with its
type, so lists and numbers can be shared. `$$` is a dollar sign.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Node = None | bool | int | float | str | list["Node"] | dict[str, "Node"]
"""What YAML holds."""

_REFERENCE = re.compile(r"\$\$|\$\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"([A-Z_][A-Z0-9_]*)(?::-(.*))?", re.DOTALL)
_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Problem:
    """Something wrong in a stack file. Example: Problem("services.gateway.comand", "no such key")."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class _Unresolved(Exception):
    """Raised inside this module when a reference has no value; the message says why."""


@dataclass(frozen=True)
class Interpolated:
    """The document without references, and every reference that had no value (left as it was written)."""

    document: Node
    problems: tuple[Problem, ...]


def interpolate(document: Node, environment: Mapping[str, str]) -> Interpolated:
    """Resolves every reference in every string value; keys are left alone."""
    problems: list[Problem] = []

    def walk(node: Node, path: tuple[str, ...]) -> Node:
        if isinstance(node, dict):
            return {key: walk(value, (*path, str(key))) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value, (*path, str(index))) for index, value in enumerate(node)]
        try:
            return _resolve(node, document, environment, (".".join(path),))
        except _Unresolved as error:
            problems.append(Problem(".".join(path), str(error)))
            return node

    return Interpolated(walk(document, ()), tuple(problems))


def look_up(document: Node, path: str) -> Node:
    """The value at a dotted path; list items by number. Raises KeyError when there is none."""
    node = document
    for part in path.split("."):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            raise KeyError(path)
    return node


def _resolve(node: Node, document: Node, environment: Mapping[str, str], trail: tuple[str, ...]) -> Node:
    """A value without references. trail: the paths being resolved, outermost first, to notice a circle."""
    if isinstance(node, dict):
        return {key: _resolve(value, document, environment, trail) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolve(value, document, environment, trail) for value in node]
    if not isinstance(node, str):
        return node
    whole = _REFERENCE.fullmatch(node)
    if whole is not None and whole[1] is not None:
        return _value_of(whole[1], document, environment, trail)

    def text(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        value = _value_of(match[1], document, environment, trail)
        if isinstance(value, dict | list) or value is None:
            raise _Unresolved(f"${{{match[1]}}} is not a text or number, so it cannot stand inside another text")
        return str(value).lower() if isinstance(value, bool) else str(value)

    return _REFERENCE.sub(text, node)


def _value_of(reference: str, document: Node, environment: Mapping[str, str], trail: tuple[str, ...]) -> Node:
    variable = _ENVIRONMENT.fullmatch(reference)
    if variable is not None:
        name, default = variable[1], variable[2]
        value = environment.get(name, default)
        if value is None:
            raise _Unresolved(
                f"the environment variable {name} is not set; set it, or give a default: ${{{name}:-value}}"
            )
        return value
    if not _PATH.fullmatch(reference):
        raise _Unresolved(f"${{{reference}}} is neither ${{VARIABLE}}, ${{VARIABLE:-default}} nor ${{dotted.path}}")
    if reference in trail:
        raise _Unresolved(f"refers to itself: {' -> '.join((*trail, reference))}")
    try:
        node = look_up(document, reference)
    except KeyError:
        raise _Unresolved(f"nothing in this file is called {reference}") from None
    return _resolve(node, document, environment, (*trail, reference))
