"""What the demo can be run with: a model, what it is asked, and what its replies are rewarded for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

LETTER = "e"
FULL_SCORE_SHARE = 0.25
SHORT_ENOUGH = 40
TOO_LONG = 160


def score_letter(text: str) -> float:
    """min(1, 4 x share of the letter e): a random model can be taught this within a few steps."""
    share = text.count(LETTER) / len(text) if text else 0.0
    return min(1.0, share / FULL_SCORE_SHARE)


def score_brevity(text: str) -> float:
    """1 up to 40 characters, 0 from 160 on, linear between; an empty reply scores 0."""
    length = len(text.strip())
    if length == 0:
        return 0.0
    return min(1.0, max(0.0, (TOO_LONG - length) / (TOO_LONG - SHORT_ENOUGH)))


@dataclass(frozen=True)
class Profile:
    """One way to run the demo.

    `questions` are the prompts of one job, each answered `samples_per_question` times; the last one is shown as it is
    answered by the first and the last version.
    """

    name: str
    title: str
    stack_vars: Mapping[str, str]
    """What differs from the values of the bundled stack, which are those of smollm2."""
    questions: tuple[str, ...]
    samples_per_question: int
    temperature: float
    max_tokens: int
    jobs: int
    score: Callable[[str], float]
    rewarded: str
    """What `score` rewards, for the screen."""
    version_timeout: float
    """Seconds after the last report within which the next version must be served."""
    minutes: str

    @property
    def samples_per_job(self) -> int:
        return len(self.questions) * self.samples_per_question


TINY = Profile(
    name="tiny",
    title="a random two-layer model (0.2 million parameters, it babbles)",
    stack_vars={"learning_rate": "1.0e-2", "trainer_threads": "1", "context_length": "512"},
    questions=(
        "Tell me a story.",
        "What is the sea?",
        "Name a colour.",
        "Write a line of code.",
        "How do birds fly?",
        "Say something.",
        "What comes after ten?",
        "Describe the moon.",
    ),
    samples_per_question=8,
    temperature=1.0,
    max_tokens=32,
    jobs=12,
    score=score_letter,
    rewarded="the letter e: min(1, 4 x its share of the reply's characters)",
    version_timeout=90.0,
    minutes="2 to 3 minutes",
)

SMOLLM2 = Profile(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    stack_vars={},
    questions=("What is the capital of France?", "Why is the sky blue?"),
    samples_per_question=8,
    temperature=0.7,
    max_tokens=40,
    jobs=8,
    score=score_brevity,
    rewarded="brevity: 1 up to 40 characters, falling to 0 at 160",
    version_timeout=600.0,
    minutes="6 to 8 minutes",
)

PROFILES = {profile.name: profile for profile in (SMOLLM2, TINY)}
"""The first is the default."""
