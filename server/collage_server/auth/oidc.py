"""People who sign in through an OpenID provider: authorization code with PKCE; ID and log-out tokens are verified.

The dashboard leads the browser there and back. Codes, tokens and the client's secret stay in this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
from authlib.common.urls import add_params_to_uri
from authlib.integrations.base_client import OAuthError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oauth2.claims import JWTClaims
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry

from collage_monitor import wire
from collage_monitor.certificates import trusted_certificates
from collage_monitor.local import is_loopback
from collage_server.auth.principals import Person
from collage_server.dependencies import Dependency
from collage_server.errors import BadRequest, Busy, SignInRefused
from collage_server.settings import Settings, grants_by_group
from collage_server.store import LogOut

__all__ = ["Provider"]

_LOG: Final = logging.getLogger(__name__)
_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
"""Of signatures that are taken: all with a key pair. `none`, or HMAC with the public key, would open to anybody."""
_LEEWAY_SECONDS: Final = 60
_TIMEOUT_SECONDS: Final = 10.0
_KEPT_SECONDS: Final = 3_600.0
_REFRESH_SECONDS: Final = 30.0
_SILENT_SECONDS: Final = 5
_LONGEST_ID: Final = 255
_LONGEST_NAME: Final = 200
_SHOWN_GROUPS: Final = 20
_LOG_OUT_EVENT: Final = "http://schemas.openid.net/event/backchannel-logout"
_LOG_OUT_TYPES: Final = (None, "jwt", "logout+jwt")
_ENDPOINTS: Final = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class Provider:
    """The OpenID provider of these settings, asked on the event loop. Its metadata is cached for an hour.

    `clock` gives Unix seconds, `monotonic` measures the cache's age.
    """

    def __init__(
        self, settings: Settings, *, clock: Callable[[], float], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._issuer = str(settings.oidc_issuer)
        self._dashboard = str(settings.dashboard_url).rstrip("/")
        self._grants = grants_by_group(str(settings.oidc_roles))
        self._clock = clock
        self._monotonic = monotonic
        self._metadata: dict[str, Any] = {}
        self._metadata_at = self._keys_at = float("-inf")
        self._keys = KeySet([])
        self._metadata_lock, self._keys_lock = asyncio.Lock(), asyncio.Lock()
        self._failure, self._silent_until = "", float("-inf")
        self.dependency = Dependency("the identity provider")
        # Made once: reading certificates takes a tenth of a second. Plain HTTP on this machine needs none.
        trusted = trusted_certificates(self._issuer)
        self._trusted = trusted if isinstance(trusted, ssl.SSLContext) else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    @property
    def name(self) -> str:
        """The provider's host."""
        return urlsplit(self._issuer).hostname or self._issuer

    async def begin(self) -> wire.SignInRequest:
        """A new sign-in: the address for the browser, and the secrets that bind the answer to it.

        Raises:
            Busy: the provider does not answer.
        """
        metadata = await self._current_metadata()
        state, nonce, verifier = (secrets.token_urlsafe(48) for _ in range(3))
        async with self._client(metadata) as client:
            url, _ = client.create_authorization_url(
                metadata["authorization_endpoint"], state=state, nonce=nonce, code_verifier=verifier
            )
        return wire.SignInRequest(authorization_url=url, state=state, nonce=nonce, code_verifier=verifier)

    async def person(self, finish: wire.SignInFinish) -> Person:
        """The person behind this code, and their roles here.

        Raises:
            SignInRefused: the code or the ID token is not good, or no group of the person has a role.
            Busy: the provider does not answer.
        """
        metadata = await self._current_metadata()
        try:
            async with self._client(metadata) as client:
                tokens = await client.fetch_token(
                    metadata["token_endpoint"],
                    grant_type="authorization_code",
                    code=finish.code,
                    code_verifier=finish.code_verifier,
                )
        except OAuthError as error:
            raise _refused(f"the provider does not take this code ({error.error}); sign in again") from error
        except (httpx2.HTTPError, ValueError) as error:
            raise Busy(self._away(error), retry_after_seconds=_SILENT_SECONDS) from error
        try:
            return self._person(await self._id_token(tokens, finish.nonce))
        except (JoseError, ValueError, TypeError) as error:
            raise _refused(f"the ID token is refused ({error}); sign in again") from error

    async def log_out(self, text: str) -> LogOut:
        """The content of a log-out token.

        Raises:
            BadRequest: it is not a good one.
            Busy: the provider's keys cannot be read.
        """
        try:
            decoded = await self._decoded(text)
            claims = JWTClaims(decoded.claims, decoded.header, self._expected("jti"))
            claims.validate(now=int(self._clock()), leeway=_LEEWAY_SECONDS)
            _check_log_out(claims)
            return LogOut(
                digest=hashlib.sha256(claims["jti"].encode()).digest(),
                expires_at=float(claims["exp"]) + _LEEWAY_SECONDS,
                subject=_identifier(claims, "sub"),
                provider_session=_identifier(claims, "sid"),
            )
        except (JoseError, ValueError, TypeError) as error:
            _LOG.warning("a log-out token is refused: %s", error)
            raise BadRequest(f"the log-out token is refused ({error})", field="logout_token") from error

    async def log_out_url(self) -> str | None:
        """The address where a browser also ends its session with the provider; None if it is not available now."""
        try:
            page = (await self._current_metadata()).get("end_session_endpoint")
        except Busy:
            return None
        if not isinstance(page, str) or not self._is_safe(page):
            return None
        query = {
            "client_id": self._settings.oidc_client_id,
            "post_logout_redirect_uri": f"{self._dashboard}/sign-in",
        }
        return str(add_params_to_uri(page, list(query.items())))

    def _client(self, metadata: dict[str, Any]) -> AsyncOAuth2Client:
        methods = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        basic, post = "client_secret_basic", "client_secret_post"
        return AsyncOAuth2Client(
            self._settings.oidc_client_id,
            self._settings.oidc_client_secret,
            token_endpoint_auth_method=basic if basic in methods else post,
            scope=self._settings.oidc_scopes,
            redirect_uri=f"{self._dashboard}/sign-in/callback",
            code_challenge_method="S256",
            **self._connection(),
        )

    def _connection(self) -> dict[str, Any]:
        return {
            "timeout": _TIMEOUT_SECONDS,
            "follow_redirects": False,
            "verify": self._trusted,
            # A proxy from the environment leads to the network, not to this machine.
            "trust_env": not is_loopback(self._issuer),
        }

    async def _current_metadata(self) -> dict[str, Any]:
        async with self._metadata_lock:
            if self._monotonic() - self._metadata_at > _KEPT_SECONDS:
                found = await self._read(self._issuer.rstrip("/") + "/.well-known/openid-configuration")
                called = found.get("issuer")
                if called != self._issuer:
                    raise self._failed(
                        f"the provider calls itself {called!r}: set COLLAGE_SERVER_OIDC_ISSUER to just that"
                    )
                unsafe = [name for name in _ENDPOINTS if not self._is_safe(found.get(name))]
                if unsafe:
                    raise self._failed(f"the provider names no https:// address as {unsafe[0]}")
                self._metadata, self._metadata_at = found, self._monotonic()
            return self._metadata

    def _is_safe(self, address: object) -> bool:
        plain = is_loopback(self._issuer) and str(address).startswith("http://")
        return isinstance(address, str) and (address.startswith("https://") or plain)

    async def _current_keys(self, kept_seconds: float) -> KeySet:
        metadata = await self._current_metadata()
        async with self._keys_lock:
            if self._monotonic() - self._keys_at > kept_seconds:
                found = await self._read(metadata["jwks_uri"])
                try:
                    pairs = [key for key in found["keys"] if key["kty"] != "oct"]
                    self._keys = KeySet.import_key_set({"keys": pairs})
                except (JoseError, KeyError, ValueError, TypeError) as error:
                    raise self._failed(self._away(error)) from error
                self._keys_at = self._monotonic()
            return self._keys

    async def _read(self, address: str) -> dict[str, Any]:
        """The provider's metadata; after a failure it is not requested again at once.

        Anybody may send log-out tokens, which must not cause repeated requests.
        """
        if self._monotonic() < self._silent_until:
            raise Busy(self._failure, retry_after_seconds=_SILENT_SECONDS)
        try:
            async with httpx2.AsyncClient(**self._connection()) as client:
                answer = (await client.get(address)).raise_for_status().json()
        except (httpx2.HTTPError, ValueError) as error:
            raise self._failed(self._away(error)) from error
        if not isinstance(answer, dict):
            raise self._failed(self._away(TypeError("its answer is no JSON object")))
        self.dependency.works()
        return answer

    def _away(self, error: Exception) -> str:
        self.dependency.fails(f"{self.name}: {str(error) or type(error).__name__}")
        return f"the provider {self.name} does not answer; sign in again later"

    def _failed(self, message: str) -> Busy:
        self._failure, self._silent_until = message, self._monotonic() + _SILENT_SECONDS
        return Busy(message, retry_after_seconds=_SILENT_SECONDS)

    async def _decoded(self, text: str) -> jwt.Token:
        """Verify that the provider signed the token; an unknown key may be a new one."""
        registry = JWSRegistry(algorithms=list(_ALGORITHMS), strict_check_header=False)
        try:
            return jwt.decode(text, await self._current_keys(_KEPT_SECONDS), registry=registry)
        except InvalidKeyIdError:
            return jwt.decode(text, await self._current_keys(_REFRESH_SECONDS), registry=registry)

    def _expected(self, *also: str) -> dict[str, Any]:
        """The required claims, and the values of the first two."""
        return {
            "iss": {"essential": True, "value": self._issuer},
            "aud": {"essential": True, "value": self._settings.oidc_client_id},
            **{name: {"essential": True} for name in ("exp", "iat", *also)},
        }

    async def _id_token(self, tokens: dict[str, Any], nonce: str) -> CodeIDToken:
        """The claims of the ID token, verified."""
        text = tokens.get("id_token")
        if not isinstance(text, str):
            raise TypeError("there is none; openid must be among COLLAGE_SERVER_OIDC_SCOPES")
        decoded = await self._decoded(text)
        bound = {
            "nonce": nonce,
            "client_id": self._settings.oidc_client_id,
            "access_token": tokens.get("access_token"),
        }
        claims = CodeIDToken(decoded.claims, decoded.header, self._expected("sub", "nonce"), bound)
        claims.validate(now=int(self._clock()), leeway=_LEEWAY_SECONDS)
        return claims

    def _person(self, claims: dict[str, Any]) -> Person:
        subject = _identifier(claims, "sub")
        if subject is None:
            raise _refused("the ID token is refused (it names nobody)")
        called = (claims.get(kind) for kind in ("name", "preferred_username", "email"))
        name = next((text for text in map(_printable, called) if text), subject)
        groups = _groups(claims.get(self._settings.oidc_groups_claim))
        grants = _merged(grant for group in ("*", *(groups or ())) for grant in self._grants.get(group, ()))
        if not grants:
            raise _refused(f"{name} may not sign in here: {self._why_not(groups)}")
        return Person(subject, name[:_LONGEST_NAME], grants, _identifier(claims, "sid"))

    def _why_not(self, groups: list[str] | None) -> str:
        if groups is None:
            return (
                f"the provider's ID token has no claim {self._settings.oidc_groups_claim!r}; let the provider add "
                "it, or set COLLAGE_SERVER_OIDC_GROUPS_CLAIM to the one that lists groups"
            )
        shown = ", ".join(map(_printable, groups[:_SHOWN_GROUPS])) or "none"
        return f"none of the person's groups ({shown}) has a role; COLLAGE_SERVER_OIDC_ROLES gives roles to groups"


def _refused(message: str) -> SignInRefused:
    _LOG.warning("a sign-in is refused: %s", message)
    return SignInRefused(message)


def _identifier(claims: dict[str, Any], name: str) -> str | None:
    """An id of a person or a session; None where there is none.

    Raises:
        ValueError: it is no text of 1 to 255 characters that a database takes.
    """
    value = claims.get(name)
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= _LONGEST_ID and value.isprintable()):
        raise ValueError(f"claim {name!r} is no text of 1 to {_LONGEST_ID} printable characters")
    return value


def _check_log_out(claims: JWTClaims) -> None:
    """Checks that distinguish a log-out token from the provider's other tokens.

    Raises:
        ValueError: what is wrong with it.
    """
    events = claims.get("events")
    if not isinstance(events, dict) or not isinstance(events.get(_LOG_OUT_EVENT), dict):
        raise ValueError("it tells of no log-out")
    if "nonce" in claims:
        raise ValueError("it has a nonce, as ID tokens have")
    kind = claims.header.get("typ")
    if (kind.lower() if isinstance(kind, str) else kind) not in _LOG_OUT_TYPES:
        raise ValueError(f"its type is {kind!r}")
    if _identifier(claims, "sub") is None and _identifier(claims, "sid") is None:
        raise ValueError("it names neither a person nor a session")


def _groups(value: object) -> list[str] | None:
    """The groups that a claim lists, or names; None where it does neither."""
    listed = [value] if isinstance(value, str) else value
    return [group for group in listed if isinstance(group, str)] if isinstance(listed, list) else None


def _printable(text: object) -> str:
    """A text without characters unfit for pages, logs or databases; empty for anything that is not text."""
    return "".join(filter(str.isprintable, text)).strip() if isinstance(text, str) else ""


def _merged(grants: Iterable[wire.Grant]) -> tuple[wire.Grant, ...]:
    """One grant a role, the least first; an administrator needs no other."""
    found: dict[wire.Role, set[str] | None] = {}
    for grant in grants:
        known = found.get(grant.role, set())
        found[grant.role] = None if known is None or grant.projects is None else known | set(grant.projects)
    roles: list[wire.Role] = ["admin"] if "admin" in found else sorted(found, key=wire.ROLES.index)
    return tuple(
        wire.Grant(role=role, projects=None if (projects := found[role]) is None else sorted(projects))
        for role in roles
    )
