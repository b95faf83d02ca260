"""Reports: one page of HTML with pictures of files.

The files are checkpoints, exported models and statistics logs. `sources` finds
the kind of a path; a module for each kind makes a part of the page. `pictures`
draws, and `page` joins the parts.

It needs jinja2 and matplotlib: `pip install "tfrs_embed[report]"`.

Example:
    >>> movies = tfrs_embed.TableConfig("movies", 20_000, 64)
    >>> layer = tfrs_embed.PartialTPUEmbedding(
    ...     tfrs_embed.FeatureConfig("movie", movies), "adagrad"
    ... )
    >>> layer.build()
    >>> saved = tf.train.Checkpoint(layer=layer).save("run/checkpoint")
    >>> tfrs_embed.report.write("run", "report.html")
"""

from tfrs_embed.tools.report.writing import render, write

__all__ = ["render", "write"]
