"""An authority that signs certificates for tests, by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moonpool.base.security import TlsConfig

NAMES = "IP:127.0.0.1,DNS:localhost"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    def __init__(self, folder: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl command is missing, so there are no certificates to test TLS with")
        self._folder = folder
        self._name = name
        self.ca_file = str(folder / f"{name}.pem")
        self._key = str(folder / f"{name}.key")
        subject = ("-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl("req", "-x509", *_KEY, "-keyout", self._key, "-out", self.ca_file, "-days", "2", *subject)

    def issue(
        self,
        name: str,
        *,
        names: str = NAMES,
        purposes: str = "serverAuth,clientAuth",
        days: int = 1,
        trust: Authority | None = None,
        check_host: bool = True,
    ) -> TlsConfig:
        """A certificate; negative days are over already. Its holder trusts `trust`, or whoever signed it."""
        key, request, cert = (str(self._folder / f"{self._name}-{name}.{end}") for end in ("key", "csr", "pem"))
        extensions = self._folder / f"{self._name}-{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage={purposes}\nbasicConstraints=CA:FALSE\n")
        _openssl("req", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signer = ("-CA", self.ca_file, "-CAkey", self._key, "-CAcreateserial")
        sign = ("x509", "-req", "-in", request, *signer, "-extfile", str(extensions), "-out", cert)
        _openssl(*sign, "-days", str(days))
        return TlsConfig(cert, key, (trust or self).ca_file, check_host)


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
