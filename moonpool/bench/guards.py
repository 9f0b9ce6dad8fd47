"""A throwaway secret and certificate, for measuring what they cost: see `moonpool bench transfer`."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def secret_settings(folder: Path) -> dict[str, Any]:
    """Settings of both processes, see WireConfig."""
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return {"secret_file": str(file)}


def tls_settings(folder: Path) -> dict[str, Any] | None:
    """One certificate that signs itself, for both processes; None when there is no openssl command to make it."""
    if shutil.which("openssl") is None:
        return None
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subject = ("-subj", "/CN=moonpool bench", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    command = ["openssl", "req", "-x509", *_KEY, "-keyout", key, "-out", cert, *subject]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return {"tls_cert_file": cert, "tls_key_file": key, "tls_ca_file": cert}
