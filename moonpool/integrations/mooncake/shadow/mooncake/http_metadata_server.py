"""`mooncake.http_metadata_server`, served by Moonpool. `python -m mooncake.http_metadata_server` runs it."""

import sys

from moonpool.integrations.mooncake.http_metadata import KVBootstrapServer, KVPoll, main

__all__ = ["KVBootstrapServer", "KVPoll", "main"]

if __name__ == "__main__":
    sys.exit(main())
