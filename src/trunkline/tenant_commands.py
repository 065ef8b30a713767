"""The verbs about tenants: their flags and their help. What they do is in `tenant_answers.py`.

A table, read by `cli.py` at each start. Must stay cheap to import, and never ask anything itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trunkline.admin_client import DEFAULT_URL, KEY_VARIABLE

ROLES = (
    *("tenant.user", "tenant.admin", "org.admin"),
    *("fleet.operator", "fleet.metrics", "security.officer", "auditor"),
)
_SUBJECTS = (
    "tenant/NAME, user/TENANT/NAME, org/NAME, model/NAME, adapter/NAME, key_class/NAME, public/NAME"
    " (a public prefix), or fleet (everything)"
)
_DURATIONS = "like 90s, 45m, 12h, 30d, 8w or 1y, or a date in UTC like 2027-01-31"
_SIZE = "a size like 8000000000, 10GB or 512MiB"
_NAME = "small letters, digits and . _ -"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One verb, of one word or two."""

    summary: str
    usage: str
    examples: tuple[str, ...]
    flags: Callable[[argparse.ArgumentParser], None]


def add_arguments(name: str) -> Callable[[argparse.ArgumentParser], None]:
    """What adds the flags of this verb to its parser."""

    def add(parser: argparse.ArgumentParser) -> None:
        COMMANDS[name].flags(parser)
        add_where(parser)
        parser.set_defaults(command=name)

    return add


def add_where(parser: argparse.ArgumentParser) -> None:
    """The flags of every verb that asks the admin port."""
    group = parser.add_argument_group("which gateway, and how it is shown")
    group.add_argument(
        "--admin-url", default=DEFAULT_URL, metavar="URL", help=f"its admin port [{DEFAULT_URL}]"
    )
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        help="its admin key, or an API key with a role, or @FILE that holds one; what is written"
        f" here itself everyone on the machine can see [${KEY_VARIABLE}, else none]",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print JSON instead of text; errors as well, but for a flag that is not understood",
    )


def _verbose(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-v", "--verbose", action="store_true", help="all that the receipt holds")


def _reason(parser: argparse.ArgumentParser, *, is_required: bool = False) -> None:
    parser.add_argument(
        "--reason",
        required=is_required,
        default="",
        metavar="TEXT",
        help="why; kept in the audit log",
    )


def _keys_create(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tenant", required=True, metavar="NAME", help="whose key it is")
    add("--org", default="", metavar="NAME", help="its organisation [of a new tenant: its own]")
    add("--create-tenant", action="store_true", help="make the tenant if it does not exist")
    add("--user", default="", metavar="NAME", help="a user in the tenant [the tenant itself]")
    add(
        "--role",
        action="append",
        choices=ROLES,
        help="what it may do; may be given more than once [tenant.user]",
    )
    add("--model", action="append", metavar="NAME", help="only this model; may be repeated [all]")
    add("--adapter", action="append", metavar="NAME", help="only this adapter [all]")
    add("--expires", default="", metavar="TIME", help=f"{_DURATIONS} [never]")
    add("--class", dest="key_class", default="", metavar="NAME", help="for `revoke key_class/NAME`")
    add(
        "--scope",
        choices=("user", "session", "none"),
        help="share its cache less widely than its tenant's policy says",
    )
    _reason(parser)


def _keys_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="", metavar="NAME", help="only of this tenant [all]")


def _keys_revoke(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "key_id",
        metavar="ID",
        help="16 hex digits, as `keys list` shows them; or the whole key, of which the id alone is"
        " sent",
    )
    _reason(parser)


def _nothing(_parser: argparse.ArgumentParser) -> None:
    """A verb without flags of its own."""


def _orgs_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=_NAME)
    _reason(parser)


def _orgs_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "--shared",
        action=argparse.BooleanOptionalAction,
        required=True,
        help="whether its tenants may share a cache, where they opt in as well",
    )
    _reason(parser)


def _tenants_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=_NAME)
    parser.add_argument("--org", default="", metavar="NAME", help="[one of its own, same name]")
    parser.add_argument("--create-org", action="store_true", help="make it if it does not exist")
    _reason(parser)


def _tenants_policy(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME")
    add(
        "--scope",
        choices=("none", "session", "user", "tenant", "org"),
        help="how far its cache is shared by default [as it is]",
    )
    add(
        "--shared",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="opt in to sharing inside the organisation",
    )
    add("--requests-per-s", metavar="N", help="rate limit; `none` lifts it")
    add("--tokens-per-s", metavar="N", help="rate limit of tokens; `none` lifts it")
    add(
        "--cache-floor-bytes",
        metavar="SIZE",
        help=f"of each worker's cache, what others cannot take: {_SIZE}",
    )
    add(
        "--cache-cap-bytes",
        metavar="SIZE",
        help="the most of each worker's cache, in the same way; `none` lifts it",
    )
    add("--weight", metavar="N", help="its share where requests queue, up to 1000 [1]")
    add(
        "--priority",
        choices=("low", "normal", "high"),
        help="who is refused first while the fleet is overloaded [normal]",
    )
    _reason(parser)


def _revoke(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="SUBJECT", help=_SUBJECTS)
    parser.add_argument("--yes", action="store_true", help="needed to revoke fleet: everybody")
    _reason(parser, is_required=True)
    _verbose(parser)


def _invalidate(parser: argparse.ArgumentParser) -> None:
    _subject(parser)
    _verbose(parser)


def _subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="SUBJECT", help=_SUBJECTS)
    _reason(parser)


def _revocations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rev", nargs="?", type=int, metavar="REV", help="one of them, whole [all]")
    parser.add_argument(
        "--in-force",
        action="store_true",
        help="in place of receipts, which tenants and organisations are shut out now",
    )


def _audit_show(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--limit", type=int, default=50, metavar="N", help="how many records [50]")
    add("--after", type=int, metavar="SEQ", help="those behind this position [the newest]")
    add("--kind", default="", metavar="KIND", help="INTENT, OUTCOME, ERASED, KEY, REFUSED, ...")
    add("--since", metavar="TIME", help="not before 2026-01-31 or 2026-01-31T12:00:00+00:00")
    add("--until", metavar="TIME", help="before this time")
    add(
        "--subject",
        default="",
        metavar="SUBJECT",
        help="what is about tenant/acme (its keys and users too), user/acme/alice, key/ID, ...",
    )
    add(
        "--all",
        action="store_true",
        help="also what was wanted, before each change that grants [only what came of it]",
    )


def _audit_verify(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--from-checkpoint",
        metavar="FILE",
        help="hold it against these signed checkpoints, kept in a second place: shows a log that"
        " was cut or written anew",
    )
    add(
        "--dir",
        metavar="FOLDER",
        help="the files of a log, without asking any gateway; of a copy that was taken while the"
        " gateway ran, the checkpoints have to be copied first",
    )
    add(
        "--public-key",
        metavar="FILE",
        help="with --dir: check signatures by this key (audit-sign.key.pub of the state folder)",
    )


def _public_propose(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME")
    add(
        "--tokens",
        required=True,
        metavar="FILE",
        help="the exact token ids: a JSON array, or numbers with blanks between; whole blocks",
    )
    add(
        "--block-tokens",
        required=True,
        type=int,
        metavar="N",
        help="tokens of one block, as the workers have them (block_tokens in GET /workers)",
    )
    add("--model", required=True, metavar="NAME", help="of which model they are token ids")
    add("--owner", required=True, metavar="ORG", help="the organisation that answers for it")
    add("--audience", required=True, metavar="WHO", help="all, or organisations: acme,globex")
    add("--expires", default="30d", metavar="TIME", help=f"{_DURATIONS}, at most 90d [30d]")
    _reason(parser, is_required=True)


def _public_approve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="or its id")
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        help="the token ids that you have looked at, as for `public propose`: if others were"
        " proposed, nothing is approved",
    )
    _reason(parser)


def _public_withdraw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="or its id")
    _reason(parser)
    _verbose(parser)


COMMANDS: Mapping[str, Command] = {
    "keys create": Command(
        summary="Make an API key; it is printed once and kept nowhere.",
        usage="--tenant NAME [options]",
        examples=(
            "trunkline keys create --tenant acme --create-tenant --user alice --expires 30d",
            "(umask 077; trunkline keys create --tenant acme --role tenant.admin > acme-admin)",
            "trunkline keys create --tenant sec --role security.officer --user bob",
        ),
        flags=_keys_create,
    ),
    "keys list": Command(
        summary="Show API keys: whose they are, what they may, until when.",
        usage="[--tenant NAME]",
        examples=("trunkline keys list", "trunkline keys list --tenant acme --json"),
        flags=_keys_list,
    ),
    "keys revoke": Command(
        summary="Make one API key worthless from now on.",
        usage="ID|KEY",
        examples=("trunkline keys revoke 2b902f8911e81818 --reason 'laptop lost'",),
        flags=_keys_revoke,
    ),
    "orgs list": Command(
        summary="Show organisations.",
        usage="",
        examples=("trunkline orgs list",),
        flags=_nothing,
    ),
    "orgs add": Command(
        summary="Add an organisation.",
        usage="NAME",
        examples=("trunkline orgs add globex",),
        flags=_orgs_add,
    ),
    "orgs policy": Command(
        summary="Say whether the tenants of an organisation may share a cache.",
        usage="NAME --shared|--no-shared",
        examples=("trunkline orgs policy globex --shared",),
        flags=_orgs_policy,
    ),
    "tenants list": Command(
        summary="Show tenants and their policies.",
        usage="",
        examples=("trunkline tenants list",),
        flags=_nothing,
    ),
    "tenants add": Command(
        summary="Add a tenant.",
        usage="NAME [--org NAME]",
        examples=(
            "trunkline tenants add acme",
            "trunkline tenants add acme-eu --org acme --create-org",
        ),
        flags=_tenants_add,
    ),
    "tenants policy": Command(
        summary="Show, or change, how far a tenant's cache is shared and what it may use.",
        usage="NAME [options]",
        examples=(
            "trunkline tenants policy acme",
            "trunkline tenants policy acme --requests-per-s 50 --cache-cap-bytes 8GB",
            "trunkline tenants policy acme-eu --shared --scope org",
        ),
        flags=_tenants_policy,
    ),
    "revoke": Command(
        summary="Make everything cached of a tenant (user, model, ...) unreachable; shut it out.",
        usage="SUBJECT --reason TEXT",
        examples=(
            "trunkline revoke tenant/acme --reason 'contract ended'",
            "trunkline revoke user/acme/alice --reason 'key leaked' --json",
            "trunkline revoke fleet --yes --reason 'a worker was broken into'",
        ),
        flags=_revoke,
    ),
    "invalidate": Command(
        summary="Make everything cached of a subject unreachable; it goes on being served.",
        usage="SUBJECT",
        examples=(
            "trunkline invalidate model/llama-3 --reason 'new weights'",
            "trunkline invalidate fleet --reason 'restored a backup'",
        ),
        flags=_invalidate,
    ),
    "enable": Command(
        summary="Let in again what was revoked; its old cache stays unreachable.",
        usage="SUBJECT",
        examples=("trunkline enable tenant/acme --reason 'paid'",),
        flags=_subject,
    ),
    "revocations": Command(
        summary="Show receipts: who acknowledged, who was fenced, what was erased.",
        usage="[REV]",
        examples=(
            "trunkline revocations",
            "trunkline revocations 17 --json",
            "trunkline revocations --in-force",
        ),
        flags=_revocations,
    ),
    "audit show": Command(
        summary="Show records of the audit log.",
        usage="[options]",
        examples=(
            "trunkline audit show --limit 20",
            "trunkline audit show --subject tenant/acme",
            "trunkline audit show --kind KEY --since 2026-01-31 --json",
        ),
        flags=_audit_show,
    ),
    "audit verify": Command(
        summary="Check the audit log, record by record; exit code 1 if it was tampered with.",
        usage="[--from-checkpoint FILE] [--dir FOLDER]",
        examples=(
            "trunkline audit verify",
            "trunkline audit verify --dir /mnt/copy/audit-copy"
            " --from-checkpoint /mnt/copy/audit-copy-checkpoints.jsonl"
            " --public-key audit-sign.key.pub",
        ),
        flags=_audit_verify,
    ),
    "public propose": Command(
        summary="Propose a prefix to be shared by all of an audience; two others must approve.",
        usage="NAME --tokens FILE --block-tokens N --model NAME --owner ORG --audience WHO"
        " --reason TEXT [options]",
        examples=(
            "trunkline public propose support-v3 --tokens prompt.json --block-tokens 16"
            " --model llama-3 --owner acme --audience all --reason 'the support prompt'",
        ),
        flags=_public_propose,
    ),
    "public approve": Command(
        summary="Approve a proposed prefix, as one of two approvers.",
        usage="NAME [--tokens FILE]",
        examples=("trunkline public approve support-v3 --tokens prompt.json --admin-key @my-key",),
        flags=_public_approve,
    ),
    "public list": Command(
        summary="Show public prefixes: of how many tokens, with which digest, proposed why.",
        usage="",
        examples=("trunkline public list",),
        flags=_nothing,
    ),
    "public withdraw": Command(
        summary="Take a public prefix back, and make its blocks unreachable.",
        usage="NAME",
        examples=("trunkline public withdraw support-v3 --reason 'old'",),
        flags=_public_withdraw,
    ),
}

_REMOVING = ("delete", "remove", "rm", "del", "drop", "destroy")


def instead(name: str) -> str | None:
    """What there is in place of a verb that people look for and that there is not."""
    group, _, verb = name.partition(" ")
    if verb not in _REMOVING:
        return None
    return {
        "keys": "a key is made worthless: trunkline keys revoke ID",
        "tenants": "a tenant is shut out: trunkline revoke tenant/NAME --reason TEXT",
        "orgs": "an organisation is shut out: trunkline revoke org/NAME --reason TEXT",
        "public": "a prefix is taken back: trunkline public withdraw NAME",
    }.get(group)
