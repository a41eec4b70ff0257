"""`python -m atoll.registry`"""

from atoll.common.server import run_service
from atoll.registry.app import serve
from atoll.registry.settings import RegistrySettings

if __name__ == "__main__":
    run_service("registry", RegistrySettings, serve)
