"""Translates an S3 client's failure into icecore's error, with the cure. A failure is permanent
only if it cannot resolve by itself.

A plain `StoreError` may pass when the request is sent again. Codes:
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

import re
from typing import NamedTuple

from icecore.errors import IcecoreError, NotFound, ObjectMissing, StoreDenied, StoreError, StoreFull

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>|expecting '([a-z0-9-]{1,40})'")
_DEBUG = "\n\nDebug source:"

_CREDENTIALS = "check which credentials are used: [s3] profile, AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws"
_CURES = {
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "ExpiredToken": "renew the credentials (their session has expired)",
    "TokenRefreshRequired": "renew the credentials (their session has expired)",
    "RequestTimeTooSkewed": "set this machine's clock: it differs from the store's by more than the store accepts",
    "AccessDenied": "let these credentials get, put, delete and list objects of the bucket",
    "AllAccessDisabled": "the bucket's owner has disabled it",
    "AccountProblem": "the account behind the credentials has a problem: ask its owner",
    "MethodNotAllowed": "the bucket does not allow it: check its policy",
    "NotImplemented": "this store lacks what a repository needs",
}
#: Errors with other 4xx statuses mean that the request is wrong, whatever the code; these may be
#: transient.
_PASSING = {408, 409, 425, 429}
_FULL = {"QuotaExceeded", "StorageFull", "XMinioStorageFull", "EntityTooLarge"}
_WRONG_REGION = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_RANGE = "InvalidRange"


class Reply(NamedTuple):
    """What is known of a failed request: HTTP status (0: no reply), S3's code and message."""

    status: int
    code: str
    words: str


def parse(text: str) -> Reply:
    """Return the reply in a client's error text."""
    text = text.partition(_DEBUG)[0]
    status, code, message = _STATUS.search(text), _CODE.search(text), _MESSAGE.search(text)
    words = message[1] if message else text.rpartition(" - ")[2].strip()[:300]
    return Reply(int(status[1]) if status else 0, code[1] if code else "", words)


def is_past_end(text: str) -> bool:
    """Return whether the requested range begins beyond the object's end."""
    reply = parse(text)
    return reply.status == 416 or reply.code == _RANGE


def is_conflict(text: str) -> bool:
    """Return whether a conditional write met another one in flight. Unlike a failed precondition,
    this decides nothing.
    """
    return parse(text).status == 409


def translate(text: str, doing: str, where: str, name: str = "") -> IcecoreError:
    """Return icecore's error for a client's error text.

    Args:
        doing: What failed, as in "cannot …".
        where: The place in words.
        name: The object concerned, if any.

    Returns:
        `NotFound` (no such bucket), `ObjectMissing`, `StoreFull`, `StoreDenied` (permanent) or
        `StoreError` (may be transient).
    """
    reply = parse(text)
    what = f"{reply.code}: {reply.words}" if reply.code else reply.words or f"status {reply.status}"
    failure = f"cannot {doing} {where}: {what}"
    if reply.code == "NoSuchBucket":
        return NotFound(
            f"there is no bucket for {where}",
            cure="make the bucket first, or correct the location or the endpoint ([s3] endpoint)",
        )
    if reply.status == 404 and name:
        return ObjectMissing(f"there is no object {name} in {where}")
    if reply.status == 507 or reply.code in _FULL:
        return StoreFull(failure, cure="free space there, or 'icecore forget' and 'icecore gc'")
    if reply.code in _WRONG_REGION or reply.status in (301, 307):
        region = _REGION.search(text)
        named = next((one for one in region.groups() if one), "") if region else ""
        return StoreDenied(
            f"{failure}",
            cure=f"set [s3] region or AWS_REGION to {named!r}"
            if named
            else "set [s3] region or AWS_REGION to the bucket's",
        )
    if reply.code in _CURES:
        return StoreDenied(failure, cure=_CURES[reply.code])
    if reply.status in (401, 403):
        return StoreDenied(failure, cure=_CREDENTIALS)
    if (
        400 <= reply.status < 500
        and reply.status not in _PASSING
        and reply.code not in ("RequestTimeout", "SlowDown", "BadDigest", "IncompleteBody")
    ):
        return StoreDenied(
            failure,
            cure="the store does not accept the request: check that [s3] endpoint is an S3 service",
        )
    cure = (
        ""
        if reply.status
        else "check that the endpoint ([s3] endpoint, AWS_ENDPOINT_URL_S3) is right and can be reached from here"
    )
    return StoreError(failure, cure=cure)
