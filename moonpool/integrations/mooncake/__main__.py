"""`python -m moonpool.integrations.mooncake` prints what belongs on PYTHONPATH for engines that import `mooncake`."""

from moonpool.integrations.mooncake.shadow_path import shadow_path

print(shadow_path())
