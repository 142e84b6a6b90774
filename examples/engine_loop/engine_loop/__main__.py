"""A few turns of an engine, once on the save path and once by strata_copy: python -m engine_loop --help"""

import sys
from collections.abc import Callable

import click

from engine_loop import FORMATS, Copied, Engine, Geometry, Session, Stage
from engine_loop.check import wrong_parts
from strata_copy import Copier, CopyError, RuntimeUnavailable, runtime

TINY = Geometry(layers=8, head_dim=64, gdn=3060, ple=360, key=64)
ROW = "{:<22} {:>9} {:>8} {:>8} {:>10} {:>10}  {}"


@click.command()
@click.option("--tokens", default=8_700, show_default=True, help="Length of the conversation.")
@click.option("--format", "format", type=click.Choice(FORMATS), default="int8", show_default=True)
@click.option("--mode", type=click.IntRange(0, 1), default=0, show_default=True, help="K/V on the device, or streamed.")
@click.option(
    "--draft", type=click.Choice(["0", "2", "none"]), default="2", show_default=True, help="Mode of the draft."
)
@click.option("--devices", type=click.IntRange(1, 16), default=1, show_default=True, help="One stage on each.")
@click.option("--split", help="The first layers of the stages behind the first, as in 3,20. [default: even stages]")
@click.option("--tiny", is_flag=True, help="A model of 8 small layers.")
def main(tokens: int, format: str, mode: int, draft: str, devices: int, split: str | None, tiny: bool) -> None:
    """Reads a conversation, puts it into a slot, decodes there, and takes it back, also at a checkpoint.

    With --devices the layers are in stages on devices 0, 1, ..., the draft with the last; the host runtime has as many
    devices as are asked for. At last a row for each copy: `verified` where source and target were read back and are
    equal. Ends with status 1 where they are not.
    """
    geometry = TINY if tiny else Geometry()
    ends = stage_ends(geometry.layers, devices, split)
    kept = {"mode": mode, "draft_mode": None if draft == "none" else int(draft)}
    try:
        rows = compared(tokens, format, geometry, ends, kept)
    except (CopyError, RuntimeUnavailable, runtime.CudaError) as failure:
        raise click.ClickException(f"{type(failure).__name__}: {failure}") from failure
    show(rows, devices)
    if any(wrong for *_, wrong in rows):
        sys.exit(1)


def compared(tokens: int, format: str, geometry: Geometry, ends: list[int], kept: dict[str, int | None]) -> list[tuple]:
    """The turns on the save path and by strata_copy: for each copy whether it was direct, and what `turns` says."""
    devices = len(ends)
    if runtime.open() == "host":
        runtime.open("host", devices=devices)
    stages = Stage.split(geometry.layers, ends, range(devices))
    sessions = [
        Session(geometry, format, stages, capacity=tokens + 64, checkpoints=1, name=name, **kept)
        for name in ("main", "slot 0")
    ]
    rows = []
    with Copier(range(devices)) as copier:
        for direct in (False, True):
            click.echo(f"STRATA_SLOT_COPY_DIRECT={int(direct)}")
            engine = Engine(sessions[0], sessions[1:], copier, direct=direct, log=click.echo)
            engine.probe(1 << 20) if geometry is TINY else engine.probe()
            # Conversations differ, so that no byte that the other way has left is right for this one.
            rows += [(direct, *row) for row in turns(engine, tokens, 1 + direct)]
            engine.close()
    for session in sessions:
        session.free()
    for stage in stages:
        runtime.stream_destroy(stage.stream)
    return rows


def stage_ends(layers: int, devices: int, split: str | None) -> list[int]:
    """The layer behind each stage."""
    try:
        starts = (
            [int(word) for word in split.split(",")] if split else [layers * k // devices for k in range(1, devices)]
        )
    except ValueError as wrong:
        raise click.UsageError(f"--split is {split!r}; numbers of layers are needed, as in 3,20") from wrong
    ends = [*starts, layers]
    if len(ends) != devices or any(a >= b for a, b in zip([0, *starts], ends, strict=True)):
        raise click.UsageError(
            f"the {layers} layers are not {devices} stages, none of them empty: they would end at {ends}"
        )
    return ends


def turns(engine: Engine, tokens: int, conversation: int) -> list[tuple[str, Copied, list[str]]]:
    """Each copy: what it was, and the parts that are wrong behind it."""
    main, slot = engine.main, engine.slots[0]
    main.clear()
    main.append(conversation, n=tokens)  # a prompt is read
    found = [verified("into the slot", lambda: engine.copy_to_slot(0, main.ids), main, slot)]
    checkpoint = engine.checkpoint(slot)
    slot.append(conversation, n=32)  # the answer
    found.append(verified("back", lambda: engine.copy_from_slot(0, slot.ids), slot, main))
    # The user has edited the last turn.
    found.append(
        verified(
            "back at a checkpoint", lambda: engine.copy_from_slot(0, slot.ids, at=checkpoint), slot, main, checkpoint
        )
    )
    return found


def verified(what: str, copy: Callable[[], Copied], source: Session, target: Session, at=None):
    copied = copy()
    return what, copied, wrong_parts(source, target, at)


def show(rows: list[tuple[bool, str, Copied, list[str]]], devices: int) -> None:
    click.echo(ROW.format("copy", "way", "devices", "tokens", "MB moved", "ms", "verified"))
    for direct, what, copied, wrong in rows:
        figures = f"{copied.moved / 1e6:,.3f}", f"{1000 * copied.seconds:,.2f}"
        way = "direct" if direct else "save path"
        click.echo(
            ROW.format(what, way, devices, copied.tokens, *figures, "no: " + ", ".join(wrong) if wrong else "yes")
        )


if __name__ == "__main__":
    main()
