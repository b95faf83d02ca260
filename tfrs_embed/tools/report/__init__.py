"""Reports: one page of HTML with pictures of files.

The files are checkpoints, exported models, plans, limits of SparseCores and
statistics logs. `sources` finds the kind of a path; a module for each kind
makes a part of the page. `pictures` draws, and `page` joins the parts.

It needs jinja2 and matplotlib: `pip install "tfrs_embed[report]"`.

Example:
    >>> import pathlib
    >>> movies = tfrs_embed.TableConfig("movies", 20_000, 64)
    >>> features = tfrs_embed.FeatureConfig("movie", movies)
    >>> plan = tfrs_embed.plan(features, 1, replicas=8, batch_size=1024)
    >>> written = pathlib.Path("plan.json").write_text(plan.to_json())
    >>> tfrs_embed.report.write("plan.json", "plan.html")
"""

from tfrs_embed.tools.report.writing import render, write

__all__ = ["render", "write"]
