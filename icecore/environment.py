"""What jobs and hooks inherit of the environment: no secrets, and no credentials unless named."""

from __future__ import annotations

from collections.abc import Mapping

#: Variables that hold a secret. Jobs and hooks never inherit them.
SECRET = ("ICECORE_PASSPHRASE", "ICECORE_NEW_PASSPHRASE", "ICECORE_TARGET_PASSPHRASE")
#: Variables that give access to a repository: sources of boto3's credentials and of passphrases.
#: A job inherits one of them only if the user names it.
CREDENTIALS = (
    *SECRET,
    *(
        f"{name}_{kind}"
        for name in ("ICECORE_PASSPHRASE", "ICECORE_TARGET_PASSPHRASE")
        for kind in ("FILE", "COMMAND")
    ),
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "BOTO_CONFIG",
)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without secrets."""
    return {name: value for name, value in environment.items() if name not in SECRET}


def job_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the part of the environment that a job inherits, and the names of the credentials that
    it does not inherit.
    """
    held = [name for name in CREDENTIALS if name in environment]
    return {name: value for name, value in environment.items() if name not in held}, held
