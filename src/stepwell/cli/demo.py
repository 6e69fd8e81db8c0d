"""`stepwell demo`: see it work."""

from __future__ import annotations

from pathlib import Path

import click

from stepwell.cli._output import json_option


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), metavar="N", help="How many steps to train.")
@click.option("--save-every", type=click.IntRange(1), metavar="N", help="Save every N steps.")
@json_option
@click.pass_context
def command(ctx: click.Context, folder: Path | None, steps: int | None, save_every: int | None, as_json: bool) -> None:
    """Train a small GPT, kill it while it saves, resume, compare bits.

    Works in FOLDER (./stepwell-demo) and leaves the run there for you to look at. Needs torch and takes a minute or
    two. Exits with 1 when anything was not as promised.
    """
    from stepwell.demo.story import SAVE_EVERY, STEPS, run

    ctx.exit(run(folder, json=as_json, steps=steps or STEPS, save_every=save_every or SAVE_EVERY))
