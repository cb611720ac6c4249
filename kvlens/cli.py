"""The command line: ``kvlens report``, ``kvlens train``, ``kvlens zoo``.

Nothing of torch or TransformerLens, which take seconds to import, is imported before a command needs it.
"""

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

import kvlens
from kvlens import zoo
from kvlens.errors import KVLensError, nearest

COMMANDS = ("report", "train", "zoo")
DEFAULT_MODEL = "docs-linear"
RECIPES = ("docs-linear",)
BAD_INPUT, INTERRUPTED = 2, 130


class _Parser(argparse.ArgumentParser):
    """Answers bad input with one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 on bad input, 130 on Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?" for a shade, and goes on
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # here, where a closed pipe is answered, and not at the interpreter's end
        return status
    except KVLensError as error:
        print(f"kvlens: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("kvlens: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise KVLensError(f"no command is called {argv[0]!r}; there are {', '.join(COMMANDS)}{nearest(argv[0], COMMANDS)}")
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    if args.command is None:
        parser.print_help()
        return 0
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvlens",
        description="Mechanistic interpretability of the key-value side of attention: prompts as weights.",
        epilog="`kvlens report` alone runs a built-in example; `kvlens COMMAND --help` explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvlens {kvlens.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _add_report(commands)
    _add_train(commands)
    _add_zoo(commands)
    return parser


# --- report ----------------------------------------------------------------------------------------------------------


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="convert a prompt into a KV bias, and show what it keeps, changes and where it sits",
        description="Convert a prompt into a KV bias and measure, on a text: that the converted model without the prompt "
        "gives the logits of the original with it; what the prompt changes; which layers and heads carry it; and what is "
        "generated with the prompt, converted, and without. Without --prompt and --text, a built-in example is shown.",
        epilog="The folder gets tidy Parquet tables, summary.json and the bias (bias.safetensors). Example: kvlens report "
        "--prompt 'Colours: red, green, blue.' --text ' Colours: red, gr' --out colours",
        allow_abbrev=False,
    )
    report.add_argument("--prompt", metavar="TEXT", help="what is converted; it gets a BOS")
    report.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file instead")
    report.add_argument("--text", metavar="TEXT", help="what the predictions are compared on; tokenised apart from the prompt")
    report.add_argument("--text-file", metavar="FILE", help="read the text from a UTF-8 file instead")
    report.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help="a shipped model (see `kvlens zoo`), or a folder written by HookedKVTransformer.save (default: %(default)s)",
    )
    report.add_argument("--out", default="report", metavar="DIR", help="folder of the report (default: %(default)s)")
    report.add_argument("--overwrite", action="store_true", help="replace the report that DIR holds; nothing else is replaced")
    report.add_argument("--new-tokens", type=int, default=40, metavar="N", help="tokens to generate (default: %(default)s)")
    report.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of sampling; 0 is greedy (default: %(default)g)"
    )
    report.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    report.add_argument("--device", help="where the model runs, e.g. cpu or cuda (default: cuda where there is one)")
    report.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16", "float16"), help="of the weights (default: the model's own)"
    )
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from kvlens.report.folder import check_folder  # light: bad input is answered before torch is loaded

    check_folder(args.out, overwrite=args.overwrite)
    source = _model_folder(args.model)
    prompt, text = _prompt_and_text(args)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from kvlens.report.console import progress_bar

    with progress_bar("loading the model") as tell:
        model = _load(source, args.device, args.dtype)

        from kvlens.report.build import build_report
        from kvlens.report.write import write_report

        report = build_report(
            model,
            prompt,
            text,
            model_name=args.model,
            new_tokens=args.new_tokens,
            temperature=args.temperature,
            seed=args.seed,
            on_progress=tell,
        )
        tell("writing", 1.0)
        write_report(report, args.out, overwrite=args.overwrite)

    from kvlens.report.terminal import print_report
    from kvlens.report.write import report_files

    print_report(report)
    print("\n" + _wrapped(f"Written to {Path(args.out)}{os.sep}: {', '.join(report_files(report))}"))
    return 0


def _prompt_and_text(args: argparse.Namespace) -> tuple[str, str]:
    prompt = _given(args.prompt, args.prompt_file, "prompt")
    text = _given(args.text, args.text_file, "text")
    if prompt is None and text is None:
        from kvlens.report.example import EXAMPLE_PROMPT, EXAMPLE_TEXT

        return EXAMPLE_PROMPT, EXAMPLE_TEXT
    if prompt is None or text is None:
        missing = "--prompt" if prompt is None else "--text"
        raise KVLensError(f"{missing} is missing: give both a prompt and a text, or neither for the built-in example")
    for what, value in (("--prompt", prompt), ("--text", text)):
        if not value:
            raise KVLensError(f"{what} is empty; give at least one character")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise KVLensError(f"{what} is not valid UTF-8 text; give it in UTF-8, or as a file") from None
    return prompt, text


def _given(value: str | None, file: str | None, what: str) -> str | None:
    if file is None:
        return value
    if value is not None:
        raise KVLensError(f"--{what} and --{what}-file are both given; give one")
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise KVLensError(f"--{what}-file: cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KVLensError(f"--{what}-file: {file} is not UTF-8 text (byte {error.start}); convert it first") from error


def _model_folder(name: str) -> Path:
    """The folder of a shipped model, else ``name`` itself as a folder."""
    shipped = zoo.names()
    if name in shipped:
        return zoo.folder_of(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    listed = f"shipped are: {', '.join(shipped)}" if shipped else "this installation ships none"
    raise KVLensError(
        f"--model: {name!r} is neither a shipped model nor a folder that HookedKVTransformer.save wrote; "
        f"{listed}{nearest(name, shipped)}"
    )


def _load(folder: Path, device: str | None, dtype: str | None) -> Any:
    import torch

    from kvlens.model import HookedKVTransformer

    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise KVLensError(f"--device: {device!r} cannot be used here ({reason}); cpu always can") from error
    return HookedKVTransformer.load(folder, device=device, dtype=None if dtype is None else getattr(torch, dtype))


# --- train -----------------------------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a shipped model again, from text that every installation holds",
        description="Train docs-linear, a small linear-attention model of English documentation, from the docstrings of this "
        "installation. Needs no network; the shipped model took 28 minutes on two cores.",
        epilog="example: kvlens train docs-linear --out my-model --minutes 5",
        allow_abbrev=False,
    )
    train.add_argument("recipe", metavar="RECIPE", help="what to train: docs-linear")
    train.add_argument("--out", required=True, metavar="DIR", help="folder of the model")
    train.add_argument("--minutes", type=float, default=28.0, metavar="M", help="when to stop (default: %(default)g)")
    train.add_argument("--seed", type=int, default=0, help="of weights and order of the text (default: %(default)s)")
    train.add_argument(
        "--overwrite", action="store_true", help="replace the kvlens model that DIR holds; nothing else is replaced"
    )
    train.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    if args.recipe not in RECIPES:
        raise KVLensError(f"no recipe is called {args.recipe!r}; there is {', '.join(RECIPES)}{nearest(args.recipe, RECIPES)}")
    if not 0 < args.minutes < float("inf"):
        raise KVLensError(f"--minutes: expected a positive number, got {args.minutes:g}")
    from kvlens.model.storage import check_model_folder

    check_model_folder(args.out, overwrite=args.overwrite)

    from kvlens.training import DocsRecipe, train_docs_linear

    recipe = DocsRecipe(max_minutes=args.minutes, seed=args.seed)
    effect = train_docs_linear(args.out, recipe, overwrite=args.overwrite, progress=sys.stderr.isatty())
    print(f"Written to {args.out}. On held-out text, loss in nats a token:")
    print(f"  without context         {effect.without:.3f}")
    print(f"  after the context       {effect.with_context:.3f}")
    print(f"  context converted       {effect.converted:.3f}  (relative error of the logits {effect.relative_error:.1e})")
    print(f"Try it: kvlens report --model {args.out}")
    return 0


# --- zoo -------------------------------------------------------------------------------------------------------------


def _add_zoo(commands: Any) -> None:
    parser = commands.add_parser(
        "zoo",
        help="list the models that ship with kvlens",
        description="List the models that ship with kvlens: size, held-out loss (nats a token), and by how much a converted "
        "context lowers it.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_zoo)


def _zoo(args: argparse.Namespace) -> int:
    names = zoo.names()
    if not names:
        print("This installation ships no model; train one with: kvlens train docs-linear --out DIR")
        return 0
    print(f"{'name':<16}{'parameters':>12}{'size':>10}{'loss':>8}{'gain':>8}{'error':>10}")
    for name in names:
        folder = zoo.folder_of(name)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        held = facts["heldout"]
        print(
            f"{name:<16}{facts['n_parameters']:>12,}{size:>7.1f} MB{held['loss_nats_a_token']:>8.3f}"
            f"{held['gain_nats_a_token']:>8.3f}{held['relative_error_of_logits']:>10.1e}"
        )
    print("loss: held-out, nats a token; gain: what a converted context saves; error: of its logits, relative")
    return 0


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
