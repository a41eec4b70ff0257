"""Mistakes put into the real code: a module is compiled with a piece of its text replaced, and its functions run it."""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

from atoll.families.losses.hooks import ObjectiveHook


@contextmanager
def mutated(module_name: str, old: str, new: str) -> Iterator[None]:
    """Inside the block every function of the module behaves as if `old`, which must be there once, were `new`.

    Functions keep their identity, so whoever imported them runs the mistake too.
    """
    module = importlib.import_module(module_name)
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module_name}"
    assert module.__file__ is not None
    mistaken = ModuleType(module.__name__)
    mistaken.__dict__.update(vars(module))
    exec(compile(source.replace(old, new), module.__file__, "exec"), vars(mistaken))
    wrong = functions(mistaken)
    before = {name: function.__code__ for name, function in functions(module).items()}
    assert any(code != wrong[name].__code__ for name, code in before.items()), f"nothing changed in {module_name}"
    try:
        for name, function in functions(module).items():
            function.__code__ = wrong[name].__code__
        yield
    finally:
        for name, function in functions(module).items():
            function.__code__ = before[name]


def functions(module: ModuleType) -> dict[str, FunctionType]:
    """Functions and methods that the module's text defines, by qualified name."""
    found: dict[str, FunctionType] = {}
    for name, value in vars(module).items():
        own_class = inspect.isclass(value) and value.__module__ == module.__name__
        for member, held in vars(value).items() if own_class else [("", value)]:
            function = _function(held)
            if function is not None and function.__code__.co_filename == module.__file__ == inspect.getfile(function):
                found[f"{name}.{member}"] = function
    return found


def _function(value: object) -> FunctionType | None:
    if isinstance(value, ObjectiveHook):
        value = value.function
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None
