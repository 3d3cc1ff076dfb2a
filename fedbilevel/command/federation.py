"""The commands `fedbilevel federation ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.command.options import Json, option, say, say_json, target
from fedbilevel.errors import InputError
from fedbilevel.federation.nvflare_support import require_flare
from fedbilevel.federation.provision import DEFAULT_PORT, SERVER, Federation, found
from fedbilevel.settings import nearest

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Real federations: create one, start its processes, see who is connected."
)

Folder = Annotated[Path, typer.Argument(help="The federation's folder.", metavar="DIR")]


@app.command()
def init(
    folder: Folder,
    sites: Annotated[str, typer.Option(help="The sites' names, separated by commas.", metavar="NAME,NAME,...")],
    host: Annotated[str, typer.Option(help="Name or address at which the sites reach the server.")] = "localhost",
    port: Annotated[int, typer.Option(help="The server's only port, for sites and researchers.")] = DEFAULT_PORT,
) -> None:
    """Make certificates and start-up kits for a server, its sites and a researcher."""
    federation = found(folder, [site.strip() for site in sites.split(",") if site.strip()], host, port)
    say(f"created: {federation.folder}, server {federation.host}:{federation.port}")
    for site in federation.sites:
        say(f"  {site}: edit {federation.folder / site / 'local' / 'site.toml'}, which says what data it has")
    say("Give each kit to its owner and to nobody else; docs/federation.md describes the next steps.")


@app.command()
def start(
    folder: Folder,
    site: Annotated[
        list[str] | None, typer.Option("--site", help="A site's name, or 'server'; may be repeated. All kits unless given.")
    ] = None,
) -> None:
    """Start the processes of the kits in a folder, and keep them running until Ctrl-C."""
    require_flare()
    from fedbilevel.federation.processes import KitProcess, run

    names = site or [SERVER, *Federation.read(folder).sites]
    kits = [KitProcess(folder / name) for name in names]
    say(f"starting {', '.join(names)}; Ctrl-C stops them")
    run(kits, say)


@app.command()
def trust(
    kit: Annotated[Path, typer.Argument(help="The site's kit.", metavar="KIT")],
    code: Annotated[str, typer.Argument(help="A file, FILE.py, or the name of an installed package.", metavar="CODE")],
    show: Annotated[bool, typer.Option("--print", help="Print the pin, and write nothing.")] = False,
) -> None:
    """Let a site run your own task or algorithm: pin its code, as it is now, by SHA-256 in site.toml."""
    from fedbilevel.federation.pinned_code import pin, read

    found = read(code)
    if show:
        return say(f"{found.name} {found.sha256}")
    file = kit / "local" / "site.toml"
    pin(file, found)
    say(f"pinned in {file}: {found.name}, SHA-256 {found.sha256}")
    say("The site runs it as it is now. After a change it refuses, until you have read it and pinned it again.")


@app.command()
def revoke(
    folder: Folder,
    site: Annotated[str, typer.Argument(help="The site's name.")],
    readmit: Annotated[bool, typer.Option("--readmit", help="Let a revoked site in again.")] = False,
) -> None:
    """Shut a site out: disconnect it, and no longer accept its certificate."""
    from fedbilevel.federation.session import Session

    federation = Federation.read(folder)
    if site not in federation.sites:
        raise InputError(f"the federation has no site {site!r}{nearest(site, federation.sites)}")
    with Session.open(federation, say) as session:
        session.engine.enable_client(site) if readmit else session.engine.disable_client(site)
    say(f"{site}: {'may connect again' if readmit else 'shut out'}")


@app.command()
def demo(out: Annotated[Path, option(target, "Folder to write.")] = Path("runs/federation-demo")) -> None:
    """Run a server and four sites on this machine, and show that their numbers equal those of a simulation."""
    require_flare()
    from fedbilevel.federation.demo import demonstrate

    demonstrate(out, say)


@app.command()
def status(folder: Folder, json: Json = False) -> None:
    """Show which sites are connected and how many jobs are running."""
    from fedbilevel.federation.session import Session

    federation = Federation.read(folder)
    with Session.open(federation, say) as session:
        connected, jobs = session.connected(), session.running()
    if json:
        sites = [{"name": name, "connected": name in connected} for name in federation.sites]
        return say_json({"host": federation.host, "port": federation.port, "running_jobs": len(jobs), "sites": sites})
    say(f"server {federation.host}:{federation.port}: up, {len(jobs)} running job{'s' * (len(jobs) != 1)}")
    for name in federation.sites:
        say(f"  {name}: {'connected' if name in connected else 'not connected'}")
