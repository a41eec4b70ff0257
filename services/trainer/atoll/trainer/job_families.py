"""The loss families of a run: the scenario's own, and others that jobs bring to the same workers.

```
job names a family --its own--> the run's, with the run's options
                   --another--> resolved, refused where the workers were not started for it, then kept
```
The workers keep their start-up flags. A family brings its loss type, hooks, advantages, wire keys and options.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, Conflict, InvalidInput, NotFound
from atoll.families.batching import ReportView
from atoll.families.catalog import AnyFamily, make_family, resolve_family
from atoll.families.refusals import batch_refused, sample_refused
from atoll.families.run_settings import RunSettings
from atoll.families.samples import PromptRenderer, ReportedSample
from atoll.families.signal import FamilyState
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.backends import refuse_unsupported
from atoll.trainer.trained_families import TrainedFamilies, TrainedFamily
from pydantic import JsonValue

BROUGHT_KEPT = 16
"""Families with their options that are kept resolved; one that was forgotten is resolved again."""


@dataclass(frozen=True)
class JobFamily:
    """A family as jobs train it."""

    family: AnyFamily
    """Bound to the run."""
    binding: FamilyBinding
    is_own: bool
    """Whether it is the one that the run started with."""
    renderer: PromptRenderer | None = None
    """For a family whose teacher reads other prompts than the student did."""

    @property
    def run(self) -> RunSettings:
        return self.binding.run

    def state(self, trained: TrainedFamilies) -> FamilyState:
        """What it remembers of its earlier jobs."""
        known = trained.get(self.family.name)
        return {} if known is None else known.state

    def after(self, state: FamilyState, trained: TrainedFamilies) -> TrainedFamilies:
        """What there is to remember once a job of this family commits."""
        return {**trained, self.family.name: TrainedFamily.of(self.family, self.run, state)}


class JobFamilies:
    """The families of one run. What another family may clash with is the run's own and those that trained (`trained`,
    from the checkpoint), so that it is refused the same way before and after a restart or a rollback."""

    def __init__(
        self,
        own: JobFamily,
        make_renderer: Callable[[], PromptRenderer],
        driver_options: Collection[str] = (),
    ) -> None:
        """`driver_options`: names of what this trainer was started with (`LossFamily.driver_options`)."""
        self.own = own
        # Shared: it holds a tokenizer, and jobs may bring a family with ever other options.
        self._make_renderer = functools.cache(make_renderer)
        self._driver_options = frozenset(driver_options)
        self._brought: dict[tuple[str, str], JobFamily] = {}
        """By reference and options, the latest last."""
        self._lock = threading.Lock()

    async def find(self, name: str, options: Mapping[str, JsonValue] | None, trained: TrainedFamilies) -> JobFamily:
        """`of` in a thread: it may import a package and read a tokenizer, and the lease is renewed in the loop."""
        return await asyncio.to_thread(self.of, name, options or {}, trained)

    def of(self, name: str, options: Mapping[str, JsonValue], trained: TrainedFamilies) -> JobFamily:
        """The family that a job names, plainly or by reference, with the job's options.

        Raises: Conflict (NOT_TRAINED_HERE) for what this run cannot take; NotFound and BadConfiguration from
        resolving; InvalidInput naming the option, `options.<name>`.
        """
        if name in (self.own.family.name, self.own.family.reference()):
            self._refuse_other_options(options)
            return self.own
        kind = _resolve(name, trained)
        if kind.reference() == self.own.family.reference():
            return self.of(kind.reference(), options, trained)
        family = _with_options(kind, options)
        brought = self._kept(family, options)
        self._refuse_clash(brought, trained)
        return brought

    def _kept(self, family: AnyFamily, options: Mapping[str, JsonValue]) -> JobFamily:
        key = family.reference(), family.options.canonical_json()
        with self._lock:
            brought = self._brought.pop(key, None)
            if brought is None:
                brought = self._validated(family, options)
                if family.needs_prompt_renderer:
                    brought = replace(brought, renderer=self._make_renderer())
            self._brought[key] = brought
            if len(self._brought) > BROUGHT_KEPT:
                del self._brought[next(iter(self._brought))]
        return brought

    def _refuse_other_options(self, options: Mapping[str, JsonValue]) -> None:
        own = self.own.family
        given = _with_options(type(own), options).options
        if given != own.options:
            raise not_trained_here("options", given.canonical_json(), f"{own.options.canonical_json()} of {own.name}")

    def _validated(self, family: AnyFamily, options: Mapping[str, JsonValue]) -> JobFamily:
        run, here = self.own.run, f"a run that started with {self.own.family.name}"
        missing = sorted(set(family.driver_options) - self._driver_options)
        if missing:
            raise _family_refused(
                family, f"it needs driver options that this trainer was not started with: {', '.join(missing)}"
            )
        if family.configure_backend(run).critic is not None:
            raise _family_refused(family, f"it configures the critic, and only the actor's workers switch in {here}")
        binding = FamilyBinding(family.reference(), dict(options), run)
        family.validate_specific_args(run, f"family {family.name} in {here}")
        refuse_unsupported(binding)
        return JobFamily(family.bind(run), binding, is_own=False)

    def _refuse_clash(self, brought: JobFamily, trained: TrainedFamilies) -> None:
        mine = TrainedFamily.of(brought.family, brought.run, {})
        for name, other in sorted(self.own.after({}, trained).items()):
            if name == brought.family.name:
                continue
            if mine.distills and other.distills:
                raise _family_refused(
                    brought.family,
                    f"it is a second distillation family beside {name}, whose teacher's copy it would take",
                )
            for column, dtype in mine.columns.items():
                if other.columns.get(column, dtype) != dtype:
                    raise _family_refused(
                        brought.family,
                        f"it declares the wire key {column} as {dtype}, {name} of this run as {other.columns[column]}",
                    )


def _resolve(name: str, trained: TrainedFamilies) -> type[AnyFamily]:
    try:
        return resolve_family(name)
    except NotFound:
        # An earlier process knew it by this name, from a job that gave its reference.
        if name not in trained or not trained[name].reference:
            raise
        return resolve_family(trained[name].reference)


def _with_options(kind: type[AnyFamily], options: Mapping[str, JsonValue]) -> AnyFamily:
    try:
        return make_family(kind.reference(), options)
    except AtollError as error:
        raise InvalidInput(f"options: {error.message}", field=f"options.{error.field}", reason=error.reason) from error


def not_trained_here(field: str, given: str, here: str) -> Conflict:
    """A submission's `field` is something that this trainer does not train."""
    return Conflict(
        f"{field} is {given}, this trainer trains {here}", reason=errors_pb2.REASON_NOT_TRAINED_HERE, field=field
    )


def _family_refused(family: AnyFamily, why: str) -> Conflict:
    return Conflict(
        f"family {family.name} cannot be trained in this run: {why}; start a scenario with {family.name} instead",
        reason=errors_pb2.REASON_NOT_TRAINED_HERE,
        field="family",
    )


def refuse_other_reports(family: AnyFamily, items: Sequence[ReportedSample]) -> None:
    """Checks reports that came in under another family's contract: each by itself, and that they are one batch.

    Raises InvalidInput (REPORT_REFUSED, BATCH_REFUSED) naming the sample or the family's batching.
    """
    reports: dict[str, ReportView] = {}
    for item in items:
        spans = item.sample.versions
        producer = spans[0].weight_version if spans else ""
        known = reports.get(item.report.report_id, item.report)
        reports[known.report_id] = replace(known, weight_versions=(*known.weight_versions, producer))
        try:
            family.batching.validate(item.report)
        except AtollError as error:
            raise sample_refused(
                item.sample.sample_id,
                f"its report does not fit {family.name}: {error.message}",
                field=error.field,
                reason=error.reason,
            ) from error
    formed = family.batching.form(list(reports.values()))
    if len(formed) != 1 or set(formed[0]) != set(reports):
        raise batch_refused(
            f"the batch's {len(reports)} reports are not one batch of {family.name} ({family.options.canonical_json()})"
            "; give options that fit it",
            field="options",
        )
