"""Faults that the tests must find: planted.py writes each into a copy of the package and runs the tests named here.

The first ones are breaches of what the service promises. Those that are named after a commit undo its mend in today's
code; a test had found each of them, and that test must find it again.
"""

from __future__ import annotations

from dataclasses import dataclass

_NONE_DROPPED = "tests/frontend/test_none_dropped.py::test_every_request_is_answered_once_and_whole"
_REUSE = "tests/faults/test_pool_limit.py::test_a_worker_pulls_no_more_than_it_is_told"
_HAND_OFF = "tests/worker/test_handoff_steps.py::test_a_hand_off_joins_the_step_after_its_check"
_HOT = "tests/master/test_state_hot_keys.py"
_ANSWER, _LAST = "frontend/answer.py", 'last = b"".join(map(sse, self._form.closing())) + _DONE'
_ROUTE = (
    "conductor/service.py",
    "            return self._queue.submit(call, peer)\n",
)
_NUM_ROUTES = "            self._num_routes = getattr(self, '_num_routes', 0) + 1\n"


@dataclass(frozen=True)
class Fault:
    name: str
    why: str  # one sentence
    edits: tuple[tuple[str, str, str], ...]  # (file of the package, old text, which is there once, new text)
    tests: tuple[str, ...]  # each of them must fail, of a parametrised one at least one case


_PROMISES = (
    Fault(
        "stream-without-done",
        "The front end ends its streams without [DONE].",
        ((_ANSWER, _LAST, 'last = b"".join(map(sse, self._form.closing()))'),),
        (_NONE_DROPPED,),
    ),
    Fault(
        "stream-cut-short",
        "The front end ends its streams without the last tokens and without [DONE].",
        (
            (_ANSWER, "if chunk is not None:", "if chunk is not None and event.finish_reason is None:"),
            (_ANSWER, _LAST, 'last = b""'),
        ),
        (_NONE_DROPPED,),
    ),
    Fault(
        "decode-ends-early",
        "A decode worker ends an answer after three tokens as if it were whole.",
        (
            ("worker/decode.py", "            ended = False\n", "            ended, left = False, 3\n"),
            (
                "worker/decode.py",
                "                ended = item.finish_reason is not None\n",
                "                left -= 1\n"
                "                if not left:\n"
                "                    item = DecodeItem(tokens=item.tokens, finish_reason='length')\n"
                "                ended = item.finish_reason is not None\n",
            ),
        ),
        (_REUSE,),
    ),
    Fault(
        "conductor-is-silent",
        "The conductor never answers one request in a hundred.",
        (
            (
                *_ROUTE,
                "            decision = self._queue.submit(call, peer)\n"
                + _NUM_ROUTES
                + "            return decision if self._num_routes % 100 else asyncio.Future()\n",
            ),
        ),
        (_NONE_DROPPED,),
    ),
    Fault(
        "conductor-refuses",
        "The conductor answers one request in a hundred with an error.",
        (
            (
                *_ROUTE,
                _NUM_ROUTES + "            if self._num_routes % 100 == 0:\n"
                "                raise RuntimeError('dropped')\n"
                "            return self._queue.submit(call, peer)\n",
            ),
        ),
        (_NONE_DROPPED,),
    ),
    Fault(
        "pool-is-not-asked",
        "A prefill worker computes what the pool has, without a word.",
        (
            (
                "worker/prefill.py",
                "return await asyncio.to_thread(puller.count_stored, reusable) if reusable else 0",
                "return 0",
            ),
        ),
        (_REUSE,),
    ),
    Fault(
        "pull-is-dropped",
        "A prefill worker pulls blocks, counts none as whole and computes all of them.",
        (
            (
                "worker/kv_link/pull.py",
                "return blocks.finish(sessions[: stream.num_good], stream.failure)",
                "return blocks.finish([], stream.failure)",
            ),
        ),
        (_REUSE,),
    ),
    Fault(
        "pull-is-computed-again",
        "A prefill worker pulls blocks, reports them as reused and computes them all the same.",
        (
            (
                "engine/scheduler.py",
                "        sequence.num_computed_tokens = len(here) * self._block_tokens\n",
                "        sequence.num_computed_tokens = 0\n",
            ),
        ),
        ("tests/faults/test_pull_saves_computing.py::test_pulled_blocks_are_not_computed",),
    ),
    Fault(
        "hand-off-waits-at-worker",
        "A decode worker adopts a hand-off one step later.",
        (
            (
                "worker/decode.py",
                "            is_good = await checking\n",
                "            is_good = await checking\n            await self._on_engine(lambda: None)\n",
            ),
        ),
        (_HAND_OFF,),
    ),
    Fault(
        "hand-off-waits-in-queue",
        "The scheduler lets an adopted sequence into the batch one step later.",
        (
            (
                "engine/scheduler.py",
                "            self._start_adopted()\n"
                "        if not self.config.prefill_first:\n"
                "            self._plan_prompts(num_preemptions)\n",
                "        if not self.config.prefill_first:\n"
                "            self._plan_prompts(num_preemptions)\n"
                "        while self.queues.adopted and self.queues.has_place:\n"
                "            self.queues.start(self.queues.adopted[0])\n",
            ),
        ),
        ("tests/engine/test_scheduler.py::test_adopted_sequence_decodes_from_its_pages", _HAND_OFF),
    ),
    Fault(
        "hot-copy-evicts-what-is-worth-more",
        "A copy of a hot object takes the place of whatever eviction would drop next.",
        (
            (
                "master/state/hot_replicas.py",
                "kept.isdisjoint(members) and self._worth(members, now_s) < worth\n",
                "kept.isdisjoint(members)\n",
            ),
        ),
        (f"{_HOT}::test_what_is_worth_more_per_byte_stays",),
    ),
    Fault(
        "extra-replica-goes-last",
        "Eviction drops an object with its extra replicas, as if a writer had asked for them.",
        (("master/state/evictor.py", "[each for each in members if each in table.hot]", "list[int]()"),),
        (f"{_HOT}::test_a_replica_goes_before_its_object",),
    ),
    Fault(
        "late-report-renews-what-has-left",
        "A reader that reports reads of two replicas goes on to remember both when one has left.",
        (("master/state/reads.py", "there = num_replicas == 1 and", "there = num_replicas >= 1 and"),),
        ("tests/master/test_state_voids.py::test_a_late_report_renews_no_replica_that_has_left",),
    ),
)

_MENDS = (
    Fault(
        "37092df",
        "A master that dies a second time forgets which nodes have still to report the time that the journal lost.",
        (
            (
                "master/state/recovery.py",
                "                if segment.recount_above is None:  "
                "# else it has not answered an earlier master, and is asked the same\n"
                "                    segment.recount_above = self._last_generation\n",
                "                segment.recount_above = self._last_generation\n",
            ),
        ),
        ("tests/master/test_state_recovery.py::test_a_node_is_asked_about_the_time_that_an_earlier_master_lost",),
    ),
    Fault(
        "331ad7c",
        "A node tells the master of moved SSD records that have been written elsewhere since.",
        (("node/ssd_tier.py", "if each.new is not None and self._is_there(each)", "if each.new is not None"),),
        ("tests/node/test_node_orders.py::test_a_move_is_not_told_when_the_record_was_written_again_since",),
    ),
    Fault(
        "8fee6fb",
        "The next master grants the space of overwritten replicas at once.",
        (("master/state/objects.py", "        if is_written and places:\n", "        if False:\n"),),
        ("tests/master/test_state_recovery.py::test_space_that_was_written_over_is_kept_by_the_next_master_too",),
    ),
    Fault(
        "833d065",
        "Views after a reconnect share a session with older ones, whose end then ends theirs.",
        (
            (
                "store/client/views.py",
                "            self._retire_if_reconnected()\n            session = self._sessions.session()\n",
                "            session = self._sessions.session()\n",
            ),
            ("store/client/views.py", "                if connection is not before:", "                if False:"),
        ),
        (
            "tests/store/test_view_again.py::test_views_after_a_lost_connection_have_another_session",
            "tests/store/test_view_again.py::test_a_look_up_that_connects_again_is_the_last_of_its_session",
        ),
    ),
    Fault(
        "7b1c49b",
        "A pipeline keeps the chunk size that was chosen for a prefix from the pool, although the prefix did not come.",
        (
            (
                "worker/pipeline/leader.py",
                "chunk_tokens, spec = self._chunk_tokens(run.call, first_token), run.call.spec",
                "chunk_tokens, spec = run.call.chunk_tokens, run.call.spec",
            ),
        ),
        ("tests/faults/test_pipeline_prefix.py::test_a_block_that_leaves_after_the_look_up_is_computed",),
    ),
    Fault(
        "c1e1bdc",
        "The end of a view is told over a newer connection, where it may end the pin of another view.",
        (
            (
                "store/client/views.py",
                "self._master.call_once(m.Unpin(keys=keys, session=session), connection)",
                "self._master.call_once(m.Unpin(keys=keys, session=session))",
            ),
        ),
        ("tests/store/test_view_again.py::test_the_end_of_a_view_is_told_over_its_own_connection_only",),
    ),
    Fault(
        "e1ea4be",
        "Clients remember places of new objects before the master's disk has them.",
        (("master/state/records.py", "            self.unsynced.add(keys)\n", ""),),
        ("tests/master/test_unsynced_keys.py::test_a_new_object_is_remembered_when_the_disk_has_it",),
    ),
    Fault(
        "0086a31",
        "A client closes its connection to a node that does not answer in time, and the node ends its sessions.",
        (
            (
                "base/rpc/blocking.py",
                "isinstance(error, (TimeoutError, BlockingIOError)) and self._keeps_connection",
                "False",
            ),
        ),
        (
            "tests/base/test_rpc_blocking.py::test_a_connection_can_outlive_a_deadline",
            "tests/store/test_store_processes.py"
            "::test_a_view_outlives_a_registration_that_a_stopped_node_does_not_answer",
        ),
    ),
    Fault(
        "e7a5cc1",
        "The conductor records requests of any length, and whoever reads the records loops over their blocks.",
        (("conductor/state.py", "if self._workers and call.num_tokens > self._max_tokens:", "if False:"),),
        (
            "tests/conductor/test_conductor_state.py"
            "::test_a_prompt_longer_than_every_worker_is_refused_and_leaves_no_record",
        ),
    ),
    Fault(
        "c048969",
        "A connection that was reset before TLS began stays open.",
        (
            (
                "transfer/transports/tcp/tls.py",
                "for frame, _ in traceback.walk_tb(error.__traceback__):",
                "for frame, _ in traceback.walk_tb(None):",
            ),
        ),
        ("tests/transfer/test_tcp_tls.py::test_a_connection_that_was_reset_before_tls_began_is_closed",),
    ),
    Fault(
        "fa0bc9a",
        "A client whose request was refused may go on sending until the next sweep.",
        (
            (
                "frontend/protocol.py",
                "if self.watch.overdue(self.loop.time()) is Phase.DRAINING:",
                "if False:",
            ),
        ),
        ("tests/frontend/test_frontend_connections.py::test_headers_without_end_take_no_memory",),
    ),
)

FAULTS = {fault.name: fault for fault in (*_PROMISES, *_MENDS)}
