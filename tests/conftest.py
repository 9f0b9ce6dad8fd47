"""For all tests: a property holds however busy the machine is, so no example of it has a deadline; and what a test
mounts ends with the test process."""

from hypothesis import settings
from small_disk import own_mounts

settings.register_profile("moonpool", deadline=None)
settings.load_profile("moonpool")


def pytest_configure() -> None:
    own_mounts()
