"""For all tests: a property holds however busy the machine is, so no example of it has a deadline."""

from hypothesis import settings

settings.register_profile("moonpool", deadline=None)
settings.load_profile("moonpool")
