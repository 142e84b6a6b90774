"""A few turns of an engine, once on the save path and once by strata_copy: python -m engine_loop --help"""

import click

from engine_loop import FORMATS, Engine, Geometry, Session, Stage
from strata_copy import Copier, runtime

TINY = Geometry(layers=8, head_dim=64, gdn=3060, ple=360, key=64)


@click.command()
@click.option("--tokens", default=8_700, show_default=True, help="Length of the conversation.")
@click.option("--format", "format", type=click.Choice(FORMATS), default="int8", show_default=True)
@click.option("--mode", type=click.IntRange(0, 1), default=0, show_default=True, help="K/V on the device, or streamed.")
@click.option(
    "--draft", type=click.Choice(["0", "2", "none"]), default="2", show_default=True, help="Mode of the draft."
)
@click.option("--devices", default=1, show_default=True, help="One stage on each.")
@click.option("--tiny", is_flag=True, help="A model of 8 small layers.")
def main(tokens: int, format: str, mode: int, draft: str, devices: int, tiny: bool) -> None:
    """Reads a conversation, puts it into a slot, decodes there, and takes it back, also at a checkpoint."""
    runtime.open()
    geometry = TINY if tiny else Geometry()
    ends = [geometry.layers * (k + 1) // devices for k in range(devices)]
    stages = Stage.split(geometry.layers, ends, range(devices))
    kept = {"mode": mode, "draft_mode": None if draft == "none" else int(draft)}
    sessions = [
        Session(geometry, format, stages, capacity=tokens + 64, checkpoints=1, name=name, **kept)
        for name in ("main", "slot 0")
    ]
    with Copier(range(devices)) as copier:
        for direct in (False, True):
            click.echo(f"STRATA_SLOT_COPY_DIRECT={int(direct)}")
            engine = Engine(sessions[0], sessions[1:], copier, direct=direct, log=click.echo)
            engine.probe()
            turns(engine, tokens)
            engine.close()
    for session in sessions:
        session.free()
    for stage in stages:
        runtime.stream_destroy(stage.stream)


def turns(engine: Engine, tokens: int) -> None:
    main, slot = engine.main, engine.slots[0]
    main.clear()
    main.append(conversation=1, n=tokens)  # a prompt is read
    engine.copy_to_slot(0, main.ids)
    checkpoint = engine.checkpoint(slot)
    slot.append(conversation=1, n=32)  # the answer
    engine.copy_from_slot(0, slot.ids)
    engine.copy_from_slot(0, slot.ids, at=checkpoint)  # the user has edited the last turn


if __name__ == "__main__":
    main()
