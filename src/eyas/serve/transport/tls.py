"""TLS: a certificate and its key, tried before a model is loaded."""

import ssl
from pathlib import Path

from eyas.errors import UserError


def tls_context(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """The context that serves a certificate, with TLS 1.2 or newer; None without one, which means plain HTTP.

    The key may be in the certificate's file. An encrypted one is refused: nobody is there to type its password.
    """
    if certfile is None:
        if keyfile is not None:
            raise UserError(f"--ssl-keyfile {keyfile} has no certificate; give --ssl-certfile as well")
        return None
    for option, file in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if file is not None:
            _require_readable(option, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    encrypted = False

    def no_password() -> str:
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        context.load_cert_chain(certfile, keyfile, password=no_password)
    except (ssl.SSLError, ValueError) as error:
        if encrypted:
            raise UserError(
                f"the key in {keyfile or certfile} is encrypted; decrypt it: openssl pkey -in KEY -out PLAIN_KEY"
            ) from error
        raise UserError(_explain(certfile, keyfile, error)) from error
    return context


def _explain(certfile: Path, keyfile: Path | None, error: Exception) -> str:
    reason = getattr(error, "reason", None) or str(error)
    if reason == "KEY_VALUES_MISMATCH":
        return f"the key in {keyfile or certfile} is not that of the certificate in {certfile}; give the pair"
    where = f"{certfile} and {keyfile}" if keyfile is not None else f"{certfile}, without --ssl-keyfile,"
    return f"{where} hold no PEM certificate with its private key ({reason}); give --ssl-certfile and --ssl-keyfile"


def _require_readable(option: str, file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError(
            f"{option} {file} cannot be read: {error.strerror}; check the path and who may read it"
        ) from error
