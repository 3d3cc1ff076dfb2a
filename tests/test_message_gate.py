"""Which messages pass at the processes of a federation, without the processes."""

import pytest

from fedbilevel.federation.message_gate import refusal
from fedbilevel.federation.provision import ADMIN

JOB = "ba5ce263-3c9c-47d7-af15-e1f9afbfb2fa"
HOST = "fed.example.org"
STREAM = {"cn__channel": "sm__STREAM", "cn__topic": "sm__DATA"}


def message(origin, destination, channel="task", topic="heart_beat", **more):
    asked = {"cn__channel": channel, "cn__topic": topic, "cn__msg_type": "req"}
    return {"cn__origin": origin, "cn__destination": destination, **asked, **more}


def piece(origin, destination, channel, topic):
    return message(origin, destination, **{"sm__ch": channel, "sm__tp": topic}) | STREAM


@pytest.mark.parametrize(
    ("here", "neighbour", "certificate", "headers"),
    [
        ("server", "a", "a", message("a", "server", client_name="a")),
        ("server", f"a.{JOB}", "a", piece(f"a.{JOB}", f"server.{JOB}", "server_command", "get_task")),
        (f"server.{JOB}", "server", "", piece(f"a.{JOB}", f"server.{JOB}", "aux_communication", "__sync_runner__")),
        ("server", f"server.{JOB}", "", message(f"server.{JOB}", "server", "server_parent_listener", "get_clients")),
        ("server", f"server.{JOB}", "", piece(f"server.{JOB}", f"a.{JOB}", "collab", "call")),
        ("server", "a", "a", message("a", "server", "admin", "admin", cn__msg_type="reply")),
        ("server", f"_admin_{JOB}", ADMIN, piece(f"_admin_{JOB}", "server", "hci_channel", "command")),
        ("a", "server", HOST, message("server", "a", "admin", "admin", client_name="server")),
        ("a", f"a.{JOB}", "", message(f"a.{JOB}", "a", "admin", "train.notify_job_status")),
        (f"a.{JOB}", "a", "", message("a", f"a.{JOB}", "client_command", "abort")),
        (f"a.{JOB}", "a", "", piece(f"server.{JOB}", f"a.{JOB}", "return_only", "collab:call")),
    ],
)
def test_what_runs_need_passes(here, neighbour, certificate, headers):
    assert refusal(here, neighbour, certificate, headers) == ""


@pytest.mark.parametrize(
    ("here", "neighbour", "certificate", "headers", "why"),
    [
        ("server", "b", "b", message("b", "a", "admin", "admin"), "it is from b to a, and sites answer only the server"),
        ("server", "b", "b", message("server", "a", "admin", "admin"), "b says that it is from server"),
        ("server", "b", "b", message("a", "server"), "b says that it is from a"),
        ("server", "server.b", "b", message("server.b", "a"), "the certificate of b does not speak for server.b"),
        ("server", "a", "b", message("a", "server"), "the certificate of b does not speak for a"),
        ("server", f"_admin_{JOB}", "b", message(f"_admin_{JOB}", "server"), "the certificate of b does not speak for _admin_"),
        ("server", "b", "b", message("b", "server", client_name="a"), "b calls itself a"),
        ("server", "b", "b", message("b", "server", client_name="server"), "b calls itself server"),
        (
            "server",
            "b",
            "b",
            message("b", "server", "server_parent_listener", "get_clients"),
            "b asks for get_clients of server_p",
        ),
        ("server", "b", "b", message("b", "server", "cellnet.channel", "bulk"), "b asks for bulk of cellnet.channel"),
        ("server", "b", "b", piece("b", "server", "hci_channel", "command"), "b asks for command of hci_channel"),
        (f"server.{JOB}", "server", "", message(f"b.{JOB}", f"server.{JOB}", "server_command", "abort"), "asks for abort of"),
        ("a", "server", HOST, message("b", "a", "admin", "admin"), "server says that it is from b"),
        ("a", "b", "b", message("b", "a", "admin", "admin"), "it comes from b, and a site hears the server alone"),
        ("a", "b", "", message("b", "a", "admin", "admin"), "it is from b to a, and sites answer only the server"),
        ("a", "server", HOST, message("server", "a", "cellnet.channel", "bulk"), "server asks for bulk of cellnet.channel"),
        ("a", "server", HOST, piece("server", "a", "aux_communication", "fed.event"), "server asks for fed.event of aux_comm"),
        (
            f"a.{JOB}",
            "server",
            HOST,
            message("server", f"a.{JOB}", "client_command", "abort"),
            "server asks for abort of client",
        ),
        ("a", "server", HOST, message(f"_admin_{JOB}", "a"), "server says that it is from _admin_"),
        ("server", f"_admin_{JOB}", ADMIN, message(f"_admin_{JOB}", "a", "admin", "admin"), "and sites answer only the server"),
        ("server", "b", "b", message(["x"] * 1000, "server\n2026", 5, {}), "b says that it is from ['x',"),
        ("server", "b", "b", {}, "b says that it is from None"),
    ],
)
def test_what_runs_do_not_need_does_not_pass(here, neighbour, certificate, headers, why):
    said = refusal(here, neighbour, certificate, headers)
    assert why in said and "\n" not in said and len(said) < 300
