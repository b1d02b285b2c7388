"""Every parameter of the catalogue that acts names a test that shows it: none is read and forgotten.

``TESTS`` has for each parameter with ``acts = "now"`` the test that fails if it is ignored; here that the test exists,
is collected, and speaks of the parameter. The tests themselves run where they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vmahybrid.cli.parameters import effect
from vmahybrid.config.catalogue import BACKENDS, load
from vmahybrid.config.gen_params import backends_of

ROOT = Path(__file__).resolve().parents[2]
ACT = "net/test_parameters_act.py::"
LANES = "net/test_ring_lanes.py::"
TCP = "net/test_tcp_params.py::"
CTL = "net/test_tcp_ctl_params.py::"
SHIM = "unit/test_shim_params.py::"
VERBS = "net/test_verbs_ring.py::"
MEMORY = "net/test_ring_memory.py::"  # of AF_XDP rings; of QPs: ARRAYS
VERBS_ACT = "net/test_verbs_params.py::"
ARRAYS = "unit/c/test_c_programs.py::test_verbs_ring_on_a_device_made_of_arrays"  # unit/c/test_ring_verbs.c
IOMUX = "unit/test_shim_iomux.py::test_iomux"  # unit/c/test_iomux*.c
C_SOURCES = {ARRAYS: "unit/c/test_ring_verbs.c", IOMUX: "unit/c/test_iomux*.c"}

TESTS = {
    "VMA_SPEC": SHIM + "test_every_profile_acts",
    "VMA_TRACELEVEL": SHIM + "test_levels",
    "VMA_LOG_DETAILS": SHIM + "test_log_details",
    "VMA_LOG_COLORS": SHIM + "test_colours_on_a_terminal_only",
    "VMA_LOG_FILE": SHIM + "test_log_file_with_pid_is_one_per_process",
    "VMA_STATS_FILE": "net/test_stats_file.py::test_sockets_that_are_closed_and_such_that_are_open_at_the_end",
    "VMA_STATS_SHMEM_DIR": SHIM + "test_statistics",
    "VMA_STATS_FD_NUM": "net/test_counters.py::test_sockets_without_a_slot",
    "VMA_CONFIG_FILE": "net/test_libvma_conf.py::test_each_role_and_a_new_file",
    "VMA_APPLICATION_ID": SHIM + "test_application_id_chooses_the_rules",
    "VMA_CPU_USAGE_STATS": IOMUX,
    "VMA_HANDLE_SIGSEGV": ACT + "test_backtrace_of_a_crash",
    "VMA_RING_ALLOCATION_LOGIC_TX": LANES + "test_sending_by_other_rings_than_receiving",
    "VMA_RING_ALLOCATION_LOGIC_RX": LANES + "test_ring_per_thread_or_core",
    "VMA_RING_MIGRATION_RATIO_TX": LANES + "test_migration",
    "VMA_RING_MIGRATION_RATIO_RX": LANES + "test_migration",
    "VMA_RING_LIMIT_PER_INTERFACE": LANES + "test_limit_of_rings",
    "VMA_RING_DEV_MEM_TX": ARRAYS,
    "VMA_TX_BUFS": MEMORY + "test_buffers",
    "VMA_TX_BUF_SIZE": ARRAYS,
    "VMA_TX_WRE": MEMORY + "test_transmit_descriptors",
    "VMA_TX_WRE_BATCHING": VERBS_ACT + "test_send_completions",
    "VMA_TX_MAX_INLINE": VERBS + "test_sizes_both_ways",
    "VMA_TX_MC_LOOPBACK": ACT + "test_first_value_of_multicast_loop",
    "VMA_TX_NONBLOCKED_EAGAINS": ACT + "test_a_full_ring",
    "VMA_RX_BUFS": MEMORY + "test_buffers",
    "VMA_GRO_STREAMS_MAX": TCP + "test_merged_segments",  # how many streams: unit/c/test_tcp_merge.c
    "VMA_RX_WRE": ACT + "test_receive_buffers_of_a_ring",
    "VMA_RX_WRE_BATCHING": ARRAYS,
    "VMA_RX_BYTES_MIN": ACT + "test_least_receive_limit",
    "VMA_RX_POLL": ACT + "test_spinning",
    "VMA_RX_POLL_INIT": ACT + "test_poll_before_a_flow_is_on_a_ring",
    "VMA_RX_UDP_POLL_OS_RATIO": ACT + "test_looks_at_the_kernel_while_spinning",
    "VMA_RX_POLL_YIELD": ACT + "test_yield_while_spinning",
    "VMA_RX_CQ_DRAIN_RATE_NSEC": ACT + "test_a_look_at_the_ring_while_something_is_queued",
    "VMA_UDP_3T_RULES": ACT + "test_rules_of_connected_sockets",
    "VMA_SELECT_POLL": ACT + "test_spinning",
    "VMA_SELECT_POLL_OS_FORCE": ACT + "test_the_kernel_is_polled_where_nothing_is_on_a_ring",
    "VMA_SELECT_POLL_OS_RATIO": IOMUX,
    "VMA_SELECT_SKIP_OS": IOMUX,
    "VMA_PROGRESS_ENGINE_INTERVAL": ACT + "test_what_waits_for_a_program_that_does_something_else",
    "VMA_PROGRESS_ENGINE_WCE_MAX": ACT + "test_frames_that_the_internal_thread_takes",
    "VMA_CQ_MODERATION_ENABLE": VERBS + "test_static_and_adaptive_moderation",
    "VMA_CQ_MODERATION_COUNT": VERBS + "test_static_and_adaptive_moderation",
    "VMA_CQ_MODERATION_PERIOD_USEC": VERBS + "test_static_and_adaptive_moderation",
    "VMA_CQ_AIM_MAX_COUNT": VERBS_ACT + "test_adaptive_moderation",
    "VMA_CQ_AIM_MAX_PERIOD_USEC": VERBS_ACT + "test_adaptive_moderation",
    "VMA_CQ_AIM_INTERVAL_MSEC": VERBS_ACT + "test_how_often_moderation_adapts",
    "VMA_CQ_AIM_INTERRUPTS_RATE_PER_SEC": VERBS_ACT + "test_adaptive_moderation",
    "VMA_CQ_POLL_BATCH_MAX": ACT + "test_packets_taken_in_one_look",
    "VMA_CQ_KEEP_QP_FULL": VERBS + "test_buffers_all_held_by_a_socket_that_is_not_read",
    "VMA_QP_COMPENSATION_LEVEL": ARRAYS,
    "VMA_OFFLOADED_SOCKETS": ACT + "test_sockets_that_are_not_offloaded",
    "VMA_TIMER_RESOLUTION_MSEC": TCP + "test_timer_resolution",
    "VMA_TCP_TIMER_RESOLUTION_MSEC": TCP + "test_timer_resolution_of_tcp",
    "VMA_TCP_TIMESTAMP_OPTION": TCP + "test_timestamps",
    "VMA_TCP_NODELAY": TCP + "test_nodelay",
    "VMA_TCP_QUICKACK": TCP + "test_quickack",
    "VMA_EXCEPTION_HANDLING": ACT + "test_a_call_that_only_the_kernel_can_do",
    "VMA_AVOID_SYS_CALLS_ON_TCP_FD": TCP + "test_no_system_calls",
    "VMA_WAIT_AFTER_JOIN_MSEC": ACT + "test_wait_after_join",
    "VMA_INTERNAL_THREAD_AFFINITY": ACT + "test_processors_of_the_internal_thread",
    "VMA_INTERNAL_THREAD_CPUSET": ACT + "test_cpuset_of_the_internal_thread",
    "VMA_INTERNAL_THREAD_ARM_CQ": ACT + "test_packets_wake_the_internal_thread",
    "VMA_THREAD_MODE": "unit/test_thread_modes.py::test_waiting_for_a_lock",
    "VMA_BUFFER_BATCHING_MODE": ACT + "test_buffers_go_back",
    "VMA_MEM_ALLOC_TYPE": MEMORY + "test_huge_pages",
    "VMA_BF": VERBS_ACT + "test_blueflame",
    "VMA_FORK": VERBS_ACT + "test_fork",
    "VMA_MTU": ACT + "test_mtu",
    "VMA_MSS": TCP + "test_mss",
    "VMA_TCP_MAX_SYN_RATE": CTL + "test_syn_rate",
    "VMA_TX_SEGS_TCP": CTL + "test_segments_that_wait",
    "VMA_TCP_CTL_THREAD": CTL + "test_the_internal_thread_handles_control_packets",
    "VMA_INTERNAL_THREAD_TCP_TIMER_HANDLING": CTL + "test_timers_in_the_internal_thread",
    "VMA_TCP_3T_RULES": ACT + "test_rules_of_tcp_connections",
    "VMA_TX_PREFETCH_BYTES": ARRAYS,
    "VMA_RX_PREFETCH_BYTES": ARRAYS,
    "VMA_RX_PREFETCH_BYTES_BEFORE_POLL": ARRAYS,
    "VMA_HW_TS_CONVERSION": "net/test_stamps_hw.py::test_hardware_stamps",
    "VMA_ETH_MC_L2_ONLY_RULES": "net/test_verbs_mc_params.py::test_rules_by_the_ethernet_address_alone",
    "VMA_MC_FORCE_FLOWTAG": "net/test_verbs_mc_params.py::test_flow_tags_of_groups",
    "VMA_TCP_CC_ALGO": TCP + "test_what_a_loss_does_to_the_window",
    "VMA_RX_POLL_ON_TX_TCP": TCP + "test_polling_in_send",
    "VMA_TRIGGER_DUMMY_SEND_GETSOCKNAME": ACT + "test_dummy_sends",
    "VMA_LOG_CB_FUNC_PTR": ACT + "test_log_lines_go_to_the_program",
    "VMA_HYBRID_SOCKET": ACT + "test_exit_where_there_is_no_service",
    "VMA_HYBRID_DEEP_BIND": "net/test_tcp_past_the_shim.py::test_the_flag_may_be_left",
    "VMA_HYBRID_TCP": "net/test_tcp_policy.py::test_offload_stays_on_the_ring",
    "VMA_HYBRID_TCP_ROUNDS": "net/test_tcp_policy.py::test_rounds_before_a_connection_is_moved",
    "VMA_HYBRID_TCP_SHOW": "net/test_tcp_show.py::test_as_many_as_the_parameter_says",
    "VMA_HYBRID_TCP_MANY": ACT + "test_many_busy_connections",
    "VMA_HYBRID_SPIN_SHARE": "net/test_tcp_policy.py::test_a_spinning_thread_leaves_the_processor",
    "VMA_HYBRID_SPIN_TURNS": ACT + "test_more_spin_than_there_are_processors",
    "VMA_HYBRID_TCP_PAYS": ACT + "test_moves_that_do_not_pay",
    "VMA_HYBRID_TCP_TOGETHER": ACT + "test_many_of_one_thread_together",
    "VMA_HYBRID_TCP_LASTS": ACT + "test_many_that_have_lasted",
    "VMA_HYBRID_TCP_BUDGET": ACT + "test_time_for_moving_connections",
    "VMA_HYBRID_TCP_BULK": "net/test_tcp_policy.py::test_what_is_less_than_asked_for_is_no_bulk",
    "VMA_HYBRID_TCP_SMALL": "net/test_tcp_policy.py::test_what_is_small",
    "VMA_HYBRID_TCP_BUSY": ACT + "test_busy_is_who_makes_so_many_rounds",
    "VMA_HYBRID_TCP_TURN": "net/test_tcp_policy.py::test_rounds_that_are_bulk_by_a_lower_threshold",
    "VMA_HYBRID_TCP_LOSS_SEGMENTS": "net/test_tcp_policy.py::test_a_lossy_connection_goes_home",
    "VMA_HYBRID_TCP_WINDOW": "net/test_tcp_policy.py::test_bulk_in_a_longer_time",
    "VMA_HYBRID_TCP_PROCESSOR": "net/test_tcp_policy.py::test_other_programs_want_the_processor",
    "VMA_HYBRID_TCP_LOSS": "net/test_tcp_policy.py::test_a_lossy_connection_goes_home",
    "VMA_HYBRID_TCP_IDLE": "net/test_tcp_policy.py::test_an_idle_connection_goes_home_and_comes_back",
    "VMA_HYBRID_POLICY": SHIM + "test_profile_and_policy_files",
    "VMA_HYBRID_PROFILE_DIR": SHIM + "test_profile_and_policy_files",
    "VMA_HYBRID_PROFILE": ACT + "test_the_profile_of_run_is_shown",
}


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Ids of the tests in the files of TESTS, without their parameters."""
    files = sorted({test.partition("::")[0] for test in TESTS.values()})
    done = subprocess.run([sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-m", "",
                           *(f"tests/{file}" for file in files)],
                          cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("[")[0].removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line}


def test_every_parameter_that_acts_has_a_test() -> None:
    assert {parameter.name for parameter in load().parameters if parameter.acts == "now"} == TESTS.keys()


def test_the_tests_exist(collected: set[str]) -> None:
    assert {test for test in TESTS.values() if test not in collected} == set()


@pytest.mark.parametrize("name", TESTS)
def test_the_test_speaks_of_the_parameter(name: str) -> None:
    """Its file does, or the C source that it builds has the field."""
    test = TESTS[name]
    if test in C_SOURCES:
        sources = [path.read_text() for path in (ROOT / "tests").glob(C_SOURCES[test])]
        assert any(re.search(rf"vmh_params\.{name.removeprefix('VMA_').lower()}\b", text) for text in sources)
    else:
        assert re.search(rf"\b{name}\b", (ROOT / "tests" / test.partition("::")[0]).read_text())


def test_what_has_no_effect_is_shown_and_warned_about() -> None:
    """One word of the catalogue makes both: the column of `config show` (unit/test_cli_parameters.py::test_effects) and
    the shim's table, from which it warns (unit/test_shim_params.py::test_what_has_no_effect_is_said_once)."""
    for parameter in load().parameters:
        for number, backend in enumerate(BACKENDS):
            warned = not backends_of(parameter) >> number & 1
            shown = effect(parameter) == "no effect" or f"no effect on {backend}" in effect(parameter)
            assert shown is warned, (parameter.name, backend)
