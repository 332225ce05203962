"""The command: python -m models.slim report | trace | cut | verify | explain."""

import argparse
import json
import signal
import sys
from pathlib import Path

from models.slim import choice, cut, explain, report, thin, trace, tree, verify
from models.slim.problems import Problem, why

RULE = "--"  # what follows is a workload's command


def parser():
    found = argparse.ArgumentParser(
        "python -m models.slim",
        description="What libraries carry for cards, what of it is loaded, and a copy without the rest.",
        epilog="A copy holds modified libraries: it is for this machine, and not to be passed on.",
    )
    kinds = found.add_subparsers(dest="kind", required=True)

    def kind(name, help, command=False):
        one = kinds.add_parser(name, help=help)
        one.add_argument("environment", help="a folder: a virtual environment, or packages, or libraries")
        one.set_defaults(takes_command=command)
        return one

    one = kind("report", "libraries and their device code, by library and by architecture")
    one.add_argument("--top", type=int, default=12, help="rows of the table of libraries; 12 unless given")
    one.add_argument("--picture", metavar="FILE", help="draw it, too: a .png or .svg")
    one.add_argument("--json", metavar="FILE", help="write it down, too")
    one = kind("trace", "which device code a command loads; needs a card", command=True)
    one.add_argument("--out", required=True, metavar="FILE", help="where to write what was found")
    one = kind("cut", "a copy with the device code of some cards alone")
    one.add_argument("--keep-arch", required=True, action="append", metavar="9.0", help="a card's capability")
    one.add_argument("--used", action="append", default=[], metavar="TRACE", help="keep only what was seen to load")
    one.add_argument("--to", required=True, metavar="DIR", help="the copy: a folder that is not there yet")
    one.add_argument("--way", choices=thin.WAYS, default=thin.WAYS[0], help="compacted unless given")
    one.add_argument("--keep-ptx", action="store_true", help="keep the latest PTX, for cards that are yet to come")
    one.add_argument("--link", action="store_true", help="link what is not cut instead of copying it: quick; a change "
                     "to one file is a change to both")  # fmt: skip
    one = kind("verify", "does a command do in the copy what it did? what became smaller?", command=True)
    one.add_argument("copy", help="what `cut` made")
    one.add_argument("--repeats", type=int, default=1, help="runs in each; the quickest counts")
    one.add_argument("--no-zstd", action="store_true", help="leave the packed sizes out, which takes a while")
    one = kind("explain", "which kernels a command asks for that were cut; needs a card", command=True)
    one.add_argument("copy", help="what `cut` made")
    return found


def main(arguments=None):
    """Run the command: 0; 1 if the copy does something else; 2 where something is asked for that cannot be."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    at = arguments.index(RULE) if RULE in arguments else len(arguments)
    command = arguments[at + 1 :]
    args = parser().parse_args(arguments[:at])
    try:
        if args.takes_command and not command:
            raise Problem(f"{args.kind}: expected a command behind -- and found none: {args.kind} … -- python run.py")
        if command and not args.takes_command:
            raise Problem(f"{args.kind}: expected no command and found one behind --: {' '.join(command)}")
        return KINDS[args.kind](args, command)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        removed = "; the copy so far is removed" if args.kind == "cut" else ""
        print(f"{args.kind}: interrupted{removed}", file=sys.stderr)
        return 130


def _report(args, _):
    found = report.report(tree.folder_of(args.environment))
    for sentence in found.damaged:
        print(f"notice: {sentence}", file=sys.stderr)
    print(found.library_table(args.top), found.arch_table(), sep="\n\n")
    if args.json:
        _write(args.json, "--json", lambda path: path.write_text(json.dumps(found.plain(), indent=1) + "\n"))
    if args.picture:
        from lab.plots import slim

        _write(args.picture, "--picture", lambda path: slim.device_code(found).savefig(path))
    return 0


def _write(path, option, write):
    try:
        write(Path(path))
    except OSError as error:
        raise Problem(f"{option}: expected a file that can be written and found {path}: {why(error)}") from None
    except ValueError as error:  # of an ending that is no picture's
        raise Problem(f"{option}: expected a picture's name and found {path}: {error}") from None


def _trace(args, command):
    found = trace.trace(args.environment, command, args.out)
    loaded = {name: len(one["used"]) for name, one in found["libraries"].items() if one["used"]}
    print(f"{found['modules']} modules loaded; {sum(loaded.values())} entries of {len(loaded)} libraries hold them")
    for name, count in sorted(loaded.items(), key=lambda item: -item[1]):
        print(f"  {count:4} of {name}")
    if found["elsewhere"]:
        print(f"{len(found['elsewhere'])} from elsewhere: made while it ran, or kept in another form")
    print(f"written: {args.out}")
    return 0


def _cut(args, _):
    cards = list(dict.fromkeys(choice.capability(text) for text in args.keep_arch))
    record = cut.cut(args.environment, args.to, cards, args.used, args.way, args.keep_ptx, args.link)
    libraries = record["libraries"].values()
    before, after = (sum(one[key] for one in libraries) / 1e6 for key in ("before", "after"))
    disk = sum(one["disk"] for one in libraries) / 1e6
    entries = sum(len(one["cut"]) for one in libraries)
    print(f"{entries:,} entries cut from {len(libraries)} libraries")
    print(f"these had {before:,.0f} MB and have {after:,.0f}, which take {disk:,.0f} on disk")
    print(f"written: {args.to}")
    return 0


def _verify(args, command):
    if args.repeats < 1:
        raise Problem(f"--repeats: expected 1 or more and found {args.repeats}")
    found, problems = verify.verify(args.environment, args.copy, command, repeats=args.repeats, zstd=not args.no_zstd)
    print(found)
    print(*(problems or ["the same output, lazy and eager"]), sep="\n")
    return int(bool(problems))


def _explain(args, command):
    print(*explain.explain(args.environment, args.copy, command), sep="\n")
    return 0


KINDS = {"report": _report, "trace": _trace, "cut": _cut, "verify": _verify, "explain": _explain}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a copy does not stay half done
    sys.exit(main())
