"""The stack file: which services make a deployment on one machine, and how each is started and known to be ready.

Everything in it is checked before anything starts, and every problem is reported at once with its path.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import yaml
from atoll.cli.interpolate import Node, Problem, interpolate, look_up
from atoll.common.errors import BadConfiguration
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

BUNDLED = Path(__file__).with_name("stacks")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _words(value: object) -> object:
    if isinstance(value, list):
        return [str(word) if isinstance(word, int | float) and not isinstance(word, bool) else word for word in value]
    return shlex.split(value) if isinstance(value, str) else value


Command = Annotated[list[str], BeforeValidator(_words), Field(min_length=1)]
"""Words, or a text that is split like a shell would; no shell runs. `python` is the interpreter that runs Atoll."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")]
Address = Annotated[str, Field(pattern=r"^[^:/\s]+:[0-9]{1,5}$")]


class Ready(_Strict):
    """How to know that a service can be used; exactly one of the four.

    Example: Ready(http="http://127.0.0.1:8700/healthz")
    """

    command: Command | None = Field(None, description="exits with 0; runs with the service's environment")
    tcp: Address | None = Field(None, description="host:port that accepts a connection")
    http: str | None = Field(None, pattern=r"^https?://", description="URL that answers 2xx")
    grpc: Address | None = Field(None, description="host:port whose gRPC health service says SERVING")

    @model_validator(mode="after")
    def _one_check(self) -> "Ready":
        given = [name for name in Ready.model_fields if name in self.model_fields_set]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of command, tcp, http, grpc, got {', '.join(given) or 'none'}")
        return self


class Service(_Strict):
    """One process of the stack. Example: Service(command=["python", "-m", "atoll.registry"])."""

    command: Command
    env: dict[str, bool | int | float | str | list[object] | dict[str, object]] = Field(
        default_factory=dict, description="added to the environment; lists and maps become JSON"
    )
    cuda: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="GPUs that the service sees; [] for none, absent for whatever the environment says"
    )
    ready: Ready | None = Field(None, description="absent: ready as soon as it is started")
    ready_timeout: float = Field(120.0, gt=0, description="seconds")
    stop_timeout: float = Field(20.0, gt=0, description="seconds between SIGTERM and SIGKILL")
    after: list[Name] | None = Field(
        None, description="services that must be ready first; absent: the one before, or none in a parallel stack"
    )

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The complete environment of the process. base: the environment of `atoll serve`."""
        values = {**base, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{base.get('PATH', os.defpath)}"}
        if self.cuda is not None:
            values["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.cuda))
        for key, value in self.env.items():
            values[key] = value if isinstance(value, str) else json.dumps(value)
        return values


class Stack(_Strict):
    """A checked stack file. `services` keeps the order of the file."""

    run_dir: Path = Field(description="logs, pid files and whatever the services store; absolute after loading")
    parallel: bool = Field(False, description="start services side by side; `after` orders those that need it")
    vars: dict[str, object] = Field(default_factory=dict, description="values for ${vars...} references")
    services: dict[Name, Service] = Field(min_length=1)

    def prerequisites(self, name: str) -> tuple[str, ...]:
        """The services that must be ready before `name` starts."""
        after = self.services[name].after
        if after is not None:
            return tuple(after)
        names = list(self.services)
        position = names.index(name)
        return () if self.parallel or position == 0 else (names[position - 1],)


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a key that is written twice; plain YAML lets the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def find_stack(name: str) -> Path:
    """The file of a stack: a path, or the name of one that comes with Atoll, e.g. "local-cpu".

    Raises BadConfiguration.
    """
    path = Path(name)
    bundled = BUNDLED / f"{name}.yaml"
    if path.is_file():
        return path
    if bundled.is_file():
        return bundled
    known = ", ".join(sorted(file.stem for file in BUNDLED.glob("*.yaml")))
    raise BadConfiguration(f"there is no stack file {name!r}; the stacks that come with Atoll are: {known}")


def load_stack(
    path: Path, overrides: Sequence[tuple[str, str]] = (), environment: Mapping[str, str] = os.environ
) -> Stack:
    """Reads and checks a stack file.

    overrides: (dotted path, YAML text) in the order given, e.g. ("services.engine.ready_timeout", "300").
    Raises BadConfiguration that lists every problem of the file with its path.
    """
    try:
        document = yaml.load(path.read_text(), _UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfiguration(f"cannot read the stack file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise BadConfiguration(f"{path} is not YAML: {error}") from None
    if not isinstance(document, dict):
        raise BadConfiguration(f"{path} holds {type(document).__name__}, expected a map with run_dir and services")
    problems = [problem for dotted, text in overrides if (problem := _override(document, dotted, text))]
    _make_absolute(document, environment)
    filled = interpolate(document, environment)
    problems += filled.problems
    stack: Stack | None = None
    try:
        stack = Stack.model_validate(filled.document)
    except ValidationError as error:
        problems += _problems_of(error, unresolved={problem.path for problem in filled.problems})
    if stack is not None:
        problems += _bad_references(stack, environment)
    if stack is None or problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise BadConfiguration(f"{path}: {len(problems)} problem{'s' if len(problems) > 1 else ''}\n{lines}")
    return stack


def _override(document: dict[str, Node], dotted: str, text: str) -> Problem | None:
    """Puts a value into the document; None when that worked."""
    try:
        value = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        return Problem(f"--{dotted}", f"the value {text!r} is not YAML: {error}")
    *parents, last = dotted.split(".")
    if parents[:1] != ["services"] or len(parents) < 2:
        # A misspelt variable would change nothing and say nothing; keys of services are checked by the schema.
        try:
            look_up(document, dotted)
        except KeyError:
            return Problem(f"--{dotted}", "nothing in the stack file is called that")
    node: Node = document
    for depth, part in enumerate(parents):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and (part in node or depth >= 2):
            node = node.setdefault(part, {})
        else:
            return Problem(f"--{dotted}", f"the stack file has no {'.'.join(parents[: depth + 1])}")
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        return Problem(f"--{dotted}", f"{'.'.join(parents)} is not a map")
    return None


def _make_absolute(document: dict[str, Node], environment: Mapping[str, str]) -> None:
    """run_dir counts from the current directory, for the services that are told about it too."""
    probe = interpolate({**document}, environment).document
    run_dir = probe.get("run_dir") if isinstance(probe, dict) else None
    if isinstance(run_dir, str) and run_dir and "${" not in run_dir:
        document["run_dir"] = str(Path(run_dir).expanduser().absolute()).replace("$", "$$")


def _problems_of(error: ValidationError, unresolved: set[str]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False, include_input=True):
        parts = [str(part) for part in item["loc"] if part != "[key]"]
        path = ".".join(parts)
        if item["type"] == "extra_forbidden":
            message = "no such key"
        elif item["type"] == "missing":
            message = "is missing"
        elif parts[:1] == ["services"] and parts[2:3] == ["env"]:
            path, message = ".".join(parts[:4]), "expected a text, number, boolean, list or map"
        else:
            message = f"{item['msg']}, got {item['input']!r}"
        if path not in unresolved:
            found.setdefault(path, Problem(path, message))
    return list(found.values())


def _bad_references(stack: Stack, environment: Mapping[str, str]) -> list[Problem]:
    """What only the whole file shows: programs that do not exist, and prerequisites that are not there in time."""
    problems = []
    names = list(stack.services)
    for position, (name, service) in enumerate(stack.services.items()):
        where = f"services.{name}"
        path = service.environment(environment)["PATH"]
        commands = {"command": service.command} | ({"ready.command": c} if (c := _ready_command(service)) else {})
        for key, command in commands.items():
            if shutil.which(command[0], path=path) is None:
                problems.append(Problem(f"{where}.{key}", f"there is no program {command[0]!r}"))
        for other in service.after or ():
            if other not in names:
                problems.append(
                    Problem(f"{where}.after", f"there is no service {other!r}; there are {', '.join(names)}")
                )
            elif names.index(other) >= position:
                problems.append(Problem(f"{where}.after", f"{other!r} does not stand before it in the file"))
    return problems


def _ready_command(service: Service) -> list[str] | None:
    return None if service.ready is None else service.ready.command
