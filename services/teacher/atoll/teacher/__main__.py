"""`python -m atoll.teacher`"""

from atoll.common.server import run_service
from atoll.teacher.app import main
from atoll.teacher.settings import TeacherSettings

if __name__ == "__main__":
    run_service("teacher", TeacherSettings, main)
