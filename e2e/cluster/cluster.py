"""One command for the cluster of demo and tests: up | images | models-volume | status | down and more."""

import json
import sys
from pathlib import Path
from typing import Annotated

import binaries as programs
import images as container_images
import node
import target
import typer
import volumes
from console import HarnessError, say, step
from paths import CLUSTER
from processes import exclusive
from target import CHOICE

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def binaries(
    control_plane_only: Annotated[
        bool, typer.Option(help="Only what an API test needs: etcd, kube-apiserver and Prometheus.")
    ] = False,
) -> None:
    """Build and install what is missing, and print the folder of the programs."""
    programs.prometheus()
    print(programs.ensure(control_plane_only))


@app.command()
def up() -> None:
    """Take the cluster of an exported KUBECONFIG, else kind, else start the embedded node. Prints the kubeconfig."""
    chosen = target.choose()
    if chosen.kind == "embedded":
        node.up()
    elif chosen.kind == "kind":
        with step("kind cluster"):
            target.kind_up()
    target.remember(chosen)
    chosen.announce()
    print(chosen.kubeconfig)


@app.command()
def down() -> None:
    """Stop and remove all that `up` started; a cluster that was running before is left alone."""
    node.down()
    if CHOICE.exists() and json.loads(CHOICE.read_text())["kind"] == "kind":
        with step("deleting the kind cluster"):
            target.kind_down()
    CHOICE.unlink(missing_ok=True)


@app.command()
def restart_apiserver() -> None:
    """End the embedded node's kube-apiserver and start it again."""
    node.restart_apiserver()


@app.command()
def images() -> None:
    """Build both images, bring them into the cluster, and print their names as JSON."""
    print(json.dumps(container_images.ensure(target.in_use())))


@app.command()
def models_volume(
    namespace: Annotated[str, typer.Option(help="The namespace of the claim; created if need be.")],
    source: Annotated[list[Path], typer.Option("--from", help="A model folder to put into it; repeatable.")] = [],  # noqa: B006
) -> None:
    """Make a bound claim `models` that holds the model folders."""
    volumes.ensure(target.in_use(), namespace, [folder.resolve() for folder in source])


@app.command()
def forget_models(
    namespace: Annotated[str, typer.Option(help="A namespace that is being deleted.")],
) -> None:
    """Remove the copies of models that `models-volume` made for a namespace."""
    volumes.remove(target.in_use(), namespace)


@app.command()
def status() -> None:
    """Say which cluster is in use and how its nodes are."""
    chosen = target.in_use()
    chosen.announce()
    print(chosen.kubectl("get", "nodes", "--output=wide"), end="")


def main() -> None:
    """Run a verb, one process at a time; an error is told in words and ends with exit code 1."""
    try:
        with exclusive(CLUSTER / ".lock"):
            app()
    except HarnessError as error:
        say(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
