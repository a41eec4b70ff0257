"""The teacher service at the trainer's start: connected, proven to have the student's tokenizer, or refused."""

from contextlib import AsyncExitStack
from pathlib import Path

from atoll.common.channels import open_channel
from atoll.common.errors import BadConfiguration
from atoll.families.catalog import AnyFamily
from atoll.families.driver import TEACHER_ENGINE
from atoll.trainer.retries import Patience
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.teacher_client import TeacherClient
from atoll.trainer.teacher_tokenizer import student_tokens


async def connect_teacher(
    settings: TrainerSettings, model_directory: Path, patience: Patience, stack: AsyncExitStack
) -> TeacherClient | None:
    """The teacher of the settings, once it answers; None where there is none.

    Raises: BadConfiguration when its tokenizer is not that of the model directory.
    """
    if settings.teacher is None:
        return None
    channel = await stack.enter_async_context(open_channel(settings.teacher, settings.token_text))
    teacher = TeacherClient(channel, patience)
    try:
        await teacher.prove_tokenizer(student_tokens(model_directory))
    except BadConfiguration as error:
        raise BadConfiguration(f"ATOLL_TRAINER_TEACHER {settings.teacher}: {error.message}") from error
    return teacher


def refuse_missing_teacher(family: AnyFamily, *, has_teacher: bool) -> None:
    """Raises BadConfiguration for a family that asks a teacher where there is none."""
    if TEACHER_ENGINE in family.driver_options and not has_teacher:
        raise BadConfiguration(
            f"{family.name} asks a teacher service with these options ({family.options.canonical_json()}), and "
            "ATOLL_TRAINER_TEACHER is not set: set it to the host:port of one, or choose a teacher that workers hold",
            field="ATOLL_TRAINER_TEACHER",
        )
