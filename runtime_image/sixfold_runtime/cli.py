"""The command `sixfold`. Each command imports what it needs: `sixfold --help` takes no second."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from sixfold_api.modes import MAX_LEVEL
from sixfold_api.runtime_config import Role

if TYPE_CHECKING:
    from sixfold_runtime.settings import RuntimeSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Inference that is cheap and stays safe.")
explain_app = typer.Typer(no_args_is_help=True, help="Which value holds, which layer set it, and why.")
app.add_typer(explain_app, name="explain")

Files = Annotated[
    list[Path] | None,
    typer.Option("-f", "--file", help="YAML file or folder with the policy and its variants. Repeatable."),
]


def _note(kind: str, text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"{kind} {escape(text)}", highlight=False)


def _fail(error: Exception, code: int = 1) -> NoReturn:
    _note("[bold red]error:[/]", str(error))
    raise typer.Exit(code)


@app.command()
def serve(
    files: Files = None,
    role: Annotated[Role | None, typer.Option(help="What this process is; with -f it is all.")] = None,
    claim: Annotated[list[str] | None, typer.Option(help="With -f: CLAIM=FOLDER stands for pvc://CLAIM.")] = None,
    policy: Annotated[str | None, typer.Option(help="With -f: which policy, if the files have several.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the API; with -f it is 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API, or of the engine with --role engine.")] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of API keys: file name = tenant, content = key."),
    ] = None,
    redis: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder with the address of a Redis in `url`, maybe a `ca.crt`."
        ),
    ] = None,
    stream_dictionary: Annotated[
        Path | None, typer.Option(exists=True, help="zstd dictionary of streams, from `sixfold dictionary train`.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.")] = None,
) -> None:
    """Serve models: in a pod from SIXFOLD_* variables, or on this machine straight from resource files."""
    from sixfold_runtime.config import ConfigStore
    from sixfold_runtime.logs import setup_logging
    from sixfold_runtime.manifests import ManifestError
    from sixfold_runtime.serve import ServeError
    from sixfold_runtime.serve import serve as run

    given = {
        "host": host or ("127.0.0.1" if files else None),
        "engine_port" if role is Role.ENGINE else "gateway_port": port,
        "api_keys_directory": api_keys,
        "redis_directory": redis,
        "stream_dictionary_directory": stream_dictionary,
        "device": device,
    }
    try:
        settings = _settings({name: value for name, value in given.items() if value is not None})
        setup_logging(settings.log_level)
        if files:
            from sixfold_runtime.local import load

            setup = load(files, _claims(claim or []), policy, settings)
            for warning in setup.warnings:
                _note("[yellow]warning:[/]", warning)
            run(setup.settings, Role.ALL, setup.config)
        elif role is None:
            raise ServeError("say --role gateway, engine or all, or give resource files with -f")
        else:
            run(settings, role, ConfigStore.watching(settings.config_directory))
    except (ManifestError, ServeError) as error:
        _fail(error)


def _settings(given: dict[str, Any]) -> RuntimeSettings:
    """What was given on the command line, then SIXFOLD_* variables, then defaults."""
    from pydantic import ValidationError

    from sixfold_runtime.config import describe
    from sixfold_runtime.settings import RuntimeSettings

    try:
        return RuntimeSettings.model_validate(given)
    except ValidationError as error:
        _fail(ValueError(describe(error)))


def _claims(options: list[str]) -> dict[str, Path]:
    claims = {}
    for option in options:
        name, separator, folder = option.partition("=")
        if not (name and separator and folder):
            raise typer.BadParameter(f"{option!r}: expected CLAIM=FOLDER", param_hint="--claim")
        claims[name] = Path(folder)
    return claims


@explain_app.command("policy")
def explain_policy(
    name: Annotated[str | None, typer.Argument(help="Name of the policy; optional with -f.")] = None,
    namespace: Annotated[str | None, typer.Option("-n", "--namespace", help="As in kubectl.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
    files: Files = None,
    level: Annotated[int | None, typer.Option(min=0, max=MAX_LEVEL, help="As it would be at this level.")] = None,
    output: Annotated[Literal["table", "json"], typer.Option("-o", "--output", help="How to print it.")] = "table",
) -> None:
    """Explain a policy in the cluster, or in files."""
    from sixfold_runtime import explain
    from sixfold_runtime.manifests import ManifestError

    try:
        if files:
            explanation = explain.from_files(files, name, level)
        elif name is None:
            raise typer.BadParameter("give the policy's name, or files with -f", param_hint="NAME")
        else:
            explanation = explain.from_cluster(name, namespace, context, level)
    except (explain.ExplainError, ManifestError) as error:
        _fail(error)
    if output == "json":
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        explain.show(explanation, Console())


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare(context: typer.Context) -> None:
    """Fetch, quantise and verify a model: what the preparation Job runs. `prepare lora` retrains an adapter, `prepare
    slice` makes task slices."""
    if context.args[:1] == ["slice"]:
        from sixfold_runtime.prepare import slice_cli

        slice_cli.app(args=context.args[1:], prog_name="sixfold prepare slice")
        return
    from sixfold_runtime.prepare import cli as commands

    retrains = context.args[:1] == ["lora"]
    single = typer.Typer(add_completion=False)
    single.command()(commands.retrain if retrains else commands.prepare)
    single(args=context.args[int(retrains) :], prog_name="sixfold prepare lora" if retrains else "sixfold prepare")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def dictionary(context: typer.Context) -> None:
    """Train a dictionary for streamed answers on your own text: `dictionary train`."""
    from sixfold_runtime import dictionary_cli

    dictionary_cli.app(args=context.args, prog_name="sixfold dictionary")


@app.command()
def gate(
    baseline: Annotated[Path, typer.Option(help="File with the figures to compare with.")],
    files: Files = None,
    claim: Annotated[list[str] | None, typer.Option(help="CLAIM=FOLDER stands for pvc://CLAIM.")] = None,
    policy: Annotated[str | None, typer.Option(help="Which policy, if the files have several.")] = None,
    level: Annotated[int | None, typer.Option(min=0, max=MAX_LEVEL, help="Measure at this level.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=4, max=10_000, help="Of each kind and repeat; as in the baseline, or 24.")
    ] = None,
    limit: Annotated[str, typer.Option(help="How much worse a figure may be, beyond what repeats differ by.")] = "10%",
    update_baseline: Annotated[bool, typer.Option(help="Keep the candidate's figures as the baseline.")] = False,
    output: Annotated[
        Literal["table", "json", "markdown"], typer.Option("-o", "--output", help="How to print it.")
    ] = "table",
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.")] = None,
) -> None:
    """Measure what a policy costs and compare it with a baseline: exits with 0 if it passes, 1 if it is over the limit,
    2 if it can't be told."""
    from sixfold_runtime.gate import command, show
    from sixfold_runtime.gate.record import GateError
    from sixfold_runtime.manifests import ManifestError

    if not files:
        raise typer.BadParameter("give the policy and its variants", param_hint="-f")
    try:
        share = command.percentage(limit)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--limit") from error
    candidate = command.Candidate(files, _claims(claim or []), policy, level)
    settings = _settings({} if device is None else {"device": device})
    progress = Console(stderr=True, soft_wrap=True)
    try:
        outcome = command.run(
            candidate, baseline, settings, limit=share, requests=requests, update=update_baseline, say=progress.print
        )
        for warning in outcome.warnings:
            _note("[yellow]warning:[/]", warning)
        show.show(outcome, output, Console())
    except (ManifestError, GateError) as error:
        _fail(error, 2)
    raise typer.Exit(0 if outcome.passed or update_baseline else 1)


Prometheus = Annotated[str | None, typer.Option(help="Address of the Prometheus that scrapes the policies.")]
Logs = Annotated[list[Path] | None, typer.Option(help="Or the gateways' request logs; - is stdin. Repeatable.")]
OfNamespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Only of this namespace.")]
OfPolicy = Annotated[str | None, typer.Option(help="Only of this policy.")]
Since = Annotated[str | None, typer.Option(help="How far back, such as 24h; of logs all of them.")]
CostPerHour = Annotated[float | None, typer.Option(min=0, help="Of an engine pod, where policies don't say.")]


@app.command()
def recommend(
    prometheus: Prometheus = None,
    log: Logs = None,
    namespace: OfNamespace = None,
    policy: OfPolicy = None,
    since: Since = None,
    files: Annotated[
        list[Path] | None, typer.Option("-f", "--file", help="YAML of the policy to change: prints a merge patch.")
    ] = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Change the policy in the cluster that --policy names, as with -f.")
    ] = False,
    context: Annotated[str | None, typer.Option(help="With --fetch: context of the kubeconfig.")] = None,
    name: Annotated[str, typer.Option(help="Of a policy that is proposed.")] = "recommended",
    draft: Annotated[str | None, typer.Option(help="ModelVariant that drafts.")] = None,
    classifier: Annotated[str | None, typer.Option(help="ModelVariant for labels that are generated today.")] = None,
    accelerators: Annotated[
        Path | None, typer.Option(help="CSV of what you measured: name,costPerHour,requestsPerSecond.")
    ] = None,
) -> None:
    """Propose a policy for the traffic there was, or a merge patch of one: YAML on standard output, with reasons."""
    from sixfold_runtime import explain
    from sixfold_runtime.manifests import ManifestError, Policy, read
    from sixfold_runtime.report import command
    from sixfold_runtime.report.model import ReportError

    try:
        existing = None
        if files:
            existing = read(files).policy(policy)
        elif fetch:
            if policy is None:
                raise typer.BadParameter("--fetch needs the policy's name", param_hint="--policy")
            found = explain.from_cluster(policy, namespace, context, None)
            existing = Policy(found.name, found.namespace, found.spec, Path())
        of_prometheus = (namespace, policy) if prometheus or not existing else (None, None)  # a log knows neither
        question = command.Question(prometheus, log or [], *of_prometheus, since, None)
        wanted = command.Wanted(name, draft, classifier, existing, accelerators)
        print(command.recommend(question, wanted, Console(stderr=True)), end="")
    except (ReportError, ManifestError, explain.ExplainError) as error:
        _fail(error)


@app.command()
def report(
    prometheus: Prometheus = None,
    log: Logs = None,
    namespace: OfNamespace = None,
    policy: OfPolicy = None,
    since: Since = None,
    cost_per_hour: CostPerHour = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the page to this file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """What inference cost, what was wasted on what, and what each level and mode saved: a page, and its figures."""
    from sixfold_runtime.report import command
    from sixfold_runtime.report.model import ReportError

    question = command.Question(prometheus, log or [], namespace, policy, since, cost_per_hour)
    try:
        found = command.answer(question)
        command.write(found, question, output, json_file)
    except ReportError as error:
        _fail(error)
    command.show(found, Console())


@app.command()
def version() -> None:
    """Print the version."""
    print(installed_version("sixfold"))


if __name__ == "__main__":
    sys.exit(app())
