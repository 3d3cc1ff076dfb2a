"""The secret of a site or of a server, from which its own random numbers come: nobody else can know them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

import numpy as np

from fedbilevel.core.locks import held
from fedbilevel.errors import InputError
from fedbilevel.runs.files import write_atomically

BYTES = 32


def own_secret(folder: Path) -> bytes:
    """The secret in a folder, which is made when it is first needed and then stays."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / "secret"
    with held(folder):
        if not file.exists():
            write_atomically(file, secrets.token_bytes(BYTES))
            file.chmod(0o600)
    content = file.read_bytes()
    if len(content) != BYTES:
        raise InputError("the secret that private answers come from is damaged: remove it, and answers are paid for anew")
    return content


def keyed(secret: bytes, question: bytes) -> bytes:
    """Bytes that only somebody with the secret can tell from random ones."""
    return hmac.new(secret, question, hashlib.sha256).digest()


def private_key(secret: bytes, question: bytes) -> np.ndarray:
    """The words of a random key for a question."""
    return np.frombuffer(keyed(secret, question)[:8], np.uint32)
