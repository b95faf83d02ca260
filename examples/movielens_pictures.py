"""Two pictures of a trained model, each of which answers a question.

`training_curve.png`: how much has the model learned, and when had it? And
`movie_map.png`: which movies does it take for alike?
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import movielens
import numpy as np
import tensorflow as tf

#: Movies on the map have so many ratings to learn from, and the most rated of
#: them have labels, where there is room.
MIN_RATINGS = 50
LABELS = 70
#: A movie has the colour of the first of these that it is of.
GROUPS = {
    "for children, animation": ("Animation", "Children's"),
    "horror": ("Horror",),
    "science fiction, action": ("Sci-Fi", "Action"),
    "comedy": ("Comedy",),
    "drama": ("Drama",),
}
COLOURS = ("#2ca02c", "#9467bd", "#1f77b4", "#ff9f1c", "#d62728")
OTHERS, GREY = "others", "#b0b0b0"
ARTICLES = ("A", "An", "The")


def draw(
    model: Any,
    data: movielens.MovieLens,
    movies: Sequence[movielens.Movie],
    history: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float],
    folder: pathlib.Path,
) -> None:
    """Draws both pictures, or says what is missing for it.

    Args:
        model: the trained model.
        data: what it was trained on.
        movies: titles and genres by row.
        history: the RMSEs of each epoch, "rmse" and "val_rmse".
        baselines: test RMSEs to compare with, by their names.
        folder: where the pictures go.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")  # No display needed.
    except ImportError:
        print("no pictures: pip install matplotlib scikit-learn")
        return
    draw_curve(history, baselines, folder / "training_curve.png")
    draw_map(model, data, movies, folder / "movie_map.png")


# The training curve.


def draw_curve(
    history: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float],
    path: pathlib.Path,
) -> None:
    """Draws the RMSE of each epoch, and what it is to be compared with."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    train, test = history["rmse"], history["val_rmse"]
    epochs = np.arange(1, len(test) + 1)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    lines = (
        ("train, during the epoch", "#7f7f7f", train),
        (
            "test, after the epoch",
            "#1f77b4",
            test,
        ),
    )
    for name, colour, values in lines:
        axes.plot(epochs, values, "o-", color=colour, ms=4, label=name)
    axes.annotate(
        f"{test[-1]:.3f}",
        (epochs[-1], test[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color="#1f77b4",
        weight="bold",
    )
    for name, value in baselines.items():
        axes.axhline(value, color="black", lw=1, ls="--")
        axes.annotate(
            f"{name}: {value:.3f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-6, 4),
            textcoords="offset points",
            ha="right",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        xlabel="epoch",
        ylabel="RMSE of ratings, in stars",
        title="MovieLens-100K: how far predicted ratings are off",
    )
    axes.set_xlim(epochs[0] - 0.3, epochs[-1] + max(0.7, len(epochs) / 12))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc=(0.64, 0.62))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


# The map.


def draw_map(
    model: Any,
    data: movielens.MovieLens,
    movies: Sequence[movielens.Movie],
    path: pathlib.Path,
) -> None:
    """Draws movies whose vectors are alike near each other."""
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits
    except ImportError:
        print("no map of movies: pip install scikit-learn")
        return
    from matplotlib import pyplot as plt

    ratings = np.bincount(data.train.movie, minlength=len(movies))
    rows = np.flatnonzero(ratings >= MIN_RATINGS)
    if len(rows) < 10:
        print(f"no map of movies: too few have {MIN_RATINGS} ratings")
        return
    rows = rows[np.argsort(-ratings[rows], kind="stable")]
    # Of so few points threads have little to do, but where other programs run
    # they wait for each other, for minutes.
    with threadpool_limits(1):
        places = TSNE(
            perplexity=min(20, (len(rows) - 1) / 3),
            metric="cosine",
            init="random",
            random_state=0,
        ).fit_transform(movie_vectors(model, data, rows))

    figure, axes = plt.subplots(figsize=(11, 8.5), layout="constrained")
    groups = np.array([group(movies[row]) for row in rows.tolist()])
    for name, colour in zip([*GROUPS, OTHERS], [*COLOURS, GREY], strict=True):
        of_group = groups == name
        axes.scatter(
            places[of_group, 0],
            places[of_group, 1],
            s=4 + ratings[rows[of_group]] / 6,
            color=colour,
            alpha=0.75,
            lw=0,
            label=name,
        )
    axes.set(
        xticks=[],
        yticks=[],
        title="Movies that the model takes for alike stand together\n"
        f"{len(rows)} movies' vectors, of id, year, genres and title, in two "
        "dimensions by t-SNE; large: many ratings",
    )
    axes.spines[:].set_visible(False)
    axes.legend(loc="lower center", ncols=6, frameon=False, markerscale=1.2)
    titles = [spoken(movies[row].title) for row in rows[:LABELS].tolist()]
    label(figure, axes, places, titles)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def movie_vectors(
    model: Any, data: movielens.MovieLens, rows: np.ndarray
) -> np.ndarray:
    """Returns what the model multiplies users' vectors with."""
    # It asks for all features, so some user's come too.
    features = data.join(tf.zeros_like(rows), tf.constant(rows))
    vectors = model.embeddings(features, training=False)
    total = tf.add_n([vectors[name] for name in data.movie_features])
    return total[:, :-1].numpy()  # The last column is the bias.


def group(movie: movielens.Movie) -> str:
    """Returns the name of the group that a movie is drawn in."""
    for name, genres in GROUPS.items():
        if set(genres) & set(movie.genres):
            return name
    return OTHERS


def spoken(title: str) -> str:
    """Returns "The Rock" for "Rock, The"."""
    name, comma, article = title.rpartition(", ")
    return f"{article} {name}" if comma and article in ARTICLES else title


def label(
    figure: Any, axes: Any, places: np.ndarray, titles: Sequence[str]
) -> None:
    """Writes titles next to their points, but none over another.

    Args:
        figure: the figure.
        axes: where the points are.
        places: the points, those with titles first.
        titles: the titles, the most important first. Those without room are
            left out.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure.canvas.draw()  # Sizes are known from here on.
    inside = axes.get_window_extent()
    # Nor over a point that has a title.
    points = axes.transData.transform(places[: len(titles)])
    taken = [Bbox.from_extents(*(p - 6), *(p + 6)) for p in points]
    taken.append(axes.get_legend().get_window_extent())
    sides = [
        (6, 0, "left", "center"),
        (-6, 0, "right", "center"),
        (0, 6, "center", "bottom"),
        (0, -6, "center", "top"),
    ]
    for place, title in zip(places, titles, strict=False):
        for x, y, across, up in sides:
            text = axes.annotate(
                title,
                place,
                xytext=(x, y),
                textcoords="offset points",
                ha=across,
                va=up,
                fontsize=8.5,
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )
            box = text.get_window_extent()
            free = not any(box.overlaps(other) for other in taken)
            if free and inside.containsx(box.x0) and inside.containsx(box.x1):
                taken.append(box)
                break
            text.remove()
