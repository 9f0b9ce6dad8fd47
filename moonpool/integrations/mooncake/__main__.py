"""`python -m moonpool.integrations.mooncake` prints the folder for PYTHONPATH with which `import mooncake` works."""

from moonpool.integrations.mooncake import shadow_path

print(shadow_path())
