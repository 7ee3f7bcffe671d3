"""Somebody changes stream or consumers while workers run: noticed, told and put right."""

from typing import Any

from nats.js import JetStreamContext
from nats.js.errors import APIError

from jsworker.core.settings import Settings
from jsworker.stream.topology import INSTALLATION
from tests.support.polling import eventually
from tests.worker.processors import KIND, echo, scripted
from tests.worker.running import StartWorker


async def edit_consumer(js: JetStreamContext, stream: str, **changes: Any) -> None:
    config = (await js.consumer_info(stream, KIND)).config
    await js.add_consumer(stream, config, **changes)


async def test_an_ack_wait_that_was_made_shorter_is_put_right_and_told(
    settings: Settings, start: StartWorker, js: JetStreamContext
) -> None:
    running = await start(scripted(echo))
    await edit_consumer(js, settings.stream, ack_wait=1.0, max_deliver=3)

    async def put_right() -> None:
        consumer = f"consumer {KIND} of stream {settings.stream}"
        told = [each for each in running.events.of("stream.changed") if each["what"] == consumer]
        assert [(each["setting"], each["was"], each["is"]) for each in told] == [
            ("ack_wait", 1.0, settings.ack_wait),
            ("max_deliver", 3, -1),
        ]

    await eventually(put_right)
    config = (await js.consumer_info(settings.stream, KIND)).config
    assert (config.ack_wait, config.max_deliver) == (settings.ack_wait, -1)


async def test_a_longer_ack_wait_is_left_to_the_worker_that_asked_for_it(
    settings: Settings, start: StartWorker, js: JetStreamContext
) -> None:
    await start(scripted(echo))
    await edit_consumer(js, settings.stream, ack_wait=settings.ack_wait + 60.0, max_deliver=3)

    async def looked() -> None:
        config = (await js.consumer_info(settings.stream, KIND)).config
        assert (config.ack_wait, config.max_deliver) == (settings.ack_wait + 60.0, -1)

    await eventually(looked)


async def test_a_paused_consumer_is_told_until_it_is_resumed(
    settings: Settings, start: StartWorker, js: JetStreamContext
) -> None:
    running = await start(scripted(echo))
    await js.pause_consumer(settings.stream, KIND, pause_until="2100-01-01T00:00:00Z")
    [degraded] = await running.events.told("worker.degraded")
    assert degraded["what"] == f"settings of consumer {KIND}"
    assert degraded["reason"] == (
        "it is paused: jobs start late, from the table, "
        f"until `nats consumer resume {settings.stream} {KIND}`"
    )
    await running.worker._components.shape._step()
    await js.resume_consumer(settings.stream, KIND)
    assert await running.events.told("worker.restored") == [{"what": f"settings of consumer {KIND}"}]
    assert len(running.events.of("worker.degraded")) == 1


async def test_workers_with_another_prefix_are_told_of_each_other(
    settings: Settings, start: StartWorker
) -> None:
    prefixes = [settings.subject_prefix, f"{settings.subject_prefix}-new"]
    workers = [
        await start(scripted(echo), with_settings=settings.model_copy(update={"subject_prefix": prefix}))
        for prefix in prefixes
    ]
    for running, own, other in zip(workers, prefixes, prefixes[::-1], strict=True):
        degraded = (await running.events.told("worker.degraded"))[0]
        assert degraded["what"] == f"settings of consumer {KIND}"
        assert degraded["reason"] == (
            f"it took the messages of JSWORKER_SUBJECT_PREFIX={other}, not of {own}: jobs start late, "
            "from the table, until all processes that use this database have the same"
        )
    await workers[1].worker.close(force=True)
    assert (await workers[0].events.told("worker.restored"))[0] == {"what": f"settings of consumer {KIND}"}


async def test_what_cannot_be_put_right_is_told_once_and_so_is_its_end(
    settings: Settings, start: StartWorker, js: JetStreamContext
) -> None:
    running = await start(scripted(echo))
    config = (await js.stream_info(settings.stream)).config
    own = config.metadata or {}
    await js.update_stream(config, metadata=own | {INSTALLATION: "another"})
    [degraded] = await running.events.told("worker.degraded")
    assert degraded["what"] == "stream settings"
    assert f"stream {settings.stream} belongs to another installation" in degraded["reason"]
    await running.worker._components.shape._step()
    await js.update_stream(config, metadata=own)
    [restored] = await running.events.told("worker.restored")
    assert restored["what"] == "stream settings"
    assert len(running.events.of("worker.degraded")) == 1


async def test_a_consumer_that_cannot_be_used_keeps_no_other_from_being_put_right(
    settings: Settings, start: StartWorker, js: JetStreamContext
) -> None:
    running = await start(scripted(echo, kind="first"), scripted(echo))

    async def replaced() -> None:
        subject = f"{settings.subject_prefix}.first"
        await js.delete_consumer(settings.stream, "first")
        try:
            await js.add_consumer(
                settings.stream, name="first", durable_name="first", filter_subject=subject, max_waiting=3
            )
        except APIError as faster:  # the worker made it again
            raise AssertionError from faster

    await eventually(replaced)
    await edit_consumer(js, settings.stream, max_deliver=3)

    async def put_right() -> None:
        assert (await js.consumer_info(settings.stream, KIND)).config.max_deliver == -1
        refused = {each["what"]: each["reason"] for each in running.events.of("worker.degraded")}
        line = f"consumer first of stream {settings.stream} cannot be used: max_waiting=3"
        assert line in refused.get("settings of consumer first", "")

    await eventually(put_right)


async def test_that_another_stream_has_the_subjects_of_the_priorities_is_told(
    settings: Settings, start: StartWorker, js: JetStreamContext
) -> None:
    other = f"{settings.stream}_EU"
    await js.add_stream(name=other, subjects=[f"{settings.subject_prefix}.eu.*"])
    running = await start(scripted(echo))
    [degraded] = await running.events.told("worker.degraded")
    assert degraded["what"] == "lanes"
    assert f"stream {other} overlaps" in degraded["reason"]
    await js.delete_stream(other)
