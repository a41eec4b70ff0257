"""Proves that the teacher's tokenizer maps every id as the student's does; else names the first difference."""

from pathlib import Path

from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.errors import BadConfiguration, InternalError, InvalidInput
from atoll.common.token_map import Token, TokenKind, TokenMap
from atoll.trainer.calls import answer_of

REMEDY = "distil from a model with the student's tokenizer"


def student_tokens(model_directory: Path) -> TokenMap:
    """Of a model directory. Raises BadConfiguration naming the file."""
    path = model_directory / "tokenizer.json"
    try:
        return TokenMap.from_tokenizer_json(path.read_bytes())
    except (OSError, InvalidInput) as error:
        raise BadConfiguration(f"{path}: a teacher's ids are compared with it: {error}") from error


async def refuse_other_tokenizer(
    teacher: "teacher_service_pb2_grpc.TeacherServiceAsyncStub", student: TokenMap
) -> None:
    """Raises BadConfiguration naming the first id, or the decoder, that the two do not share; Unavailable."""
    answer = await answer_of(
        teacher.CompareTokenizer(
            teacher_service_pb2.CompareTokenizerRequest(
                token_count=student.count, block_digests=student.block_digests, decoder=student.decoder
            )
        )
    )
    if answer.same:
        return
    theirs = {entry.id: _token(entry) for entry in answer.tokens}
    first = min(theirs, default=student.count)
    # Where the teacher's vocabulary has ended already, the student's next id is the first difference.
    start = first if theirs else answer.token_count
    for token_id in range(start, max(student.count, answer.token_count)):
        ours, other = student.token(token_id), theirs.get(token_id, Token(token_id, None, None))
        if ours != other:
            raise BadConfiguration(
                f"the teacher's tokenizer is not the student's: id {token_id} is {ours} for the student and {other} "
                f"for the teacher; {REMEDY}"
            )
    if answer.decoder:
        raise BadConfiguration(
            f"the teacher's tokenizer is not the student's: its decoder is {answer.decoder}, the student's is "
            f"{student.decoder}; {REMEDY}"
        )
    raise InternalError("the teacher says that its tokenizer is another one and shows no difference")


def _token(entry: teacher_service_pb2.TokenEntry) -> Token:
    return Token(entry.id, entry.text, TokenKind(entry.kind)) if entry.kind else Token(entry.id, None, None)
