"""Plans of reproductions that say no more than they must."""

from fedbilevel.runs.reproductions.plan import Method, Panel, Reproduction


def bare_plan(panels, methods, **more):
    """A plan on quadratics with panels of these names, and methods of these names with their other settings."""
    said = dict(title="", paper="", task="quadratic", metric="x_error", scale="plain", rounds=20, every=10, seeds=2) | more
    return Reproduction(
        name="bare",
        panels=[Panel(name=name) for name in panels],
        methods=[Method(name=name, algorithm="simfbo", **settings) for name, settings in methods.items()],
        **said,
    )
