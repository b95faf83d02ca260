"""Reports that a person looks at: one page of HTML, with pictures.

A page is made of checkpoints, exported models, plans, limits of SparseCores and
logs of statistics. `sources` tells which of them a path is; a module for each
makes its part of the page, `pictures` draws and `page` puts the parts together.

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
